"""job=analyze: measures by their definitions, pairs of one group, refusals."""

import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import DUAL, fitting, only_run, record_of, succeed, tiny, without_attention

from focus_exp import attach, set_routing
from focus_exp.evaluation.groups import (
    GroupAnalysis,
    best_pairs,
    find_distinctive,
    mask_distant_pairs,
    split_heads,
)
from focus_exp.evaluation.words import CLASSES, find_words, read_passage, split_pieces
from focus_exp.models.methods import observe_selections
from focus_exp.models.random import byte_tokenizer
from focus_exp.reporting.frame import Row, to_frame
from focus_exp.reporting.groups import (
    closest_layer,
    describe_groups,
    draw_passage,
    groups_table,
    list_pairs,
    pairs_table,
)
from focus_exp.reporting.load import load_results

JOB = ["job=analyze", "recipe.steps=2"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
@settings(max_examples=30)
def test_split_pieces_joins_to_the_text(text):
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    pieces = split_pieces(tokenizer, tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == tokenizer.decode(tokens)
    if "�" not in text:
        assert [len(piece) for piece in pieces if piece] == [1] * len(text)
    passage = read_passage(tokenizer, tokens)
    assert len(passage.classes) == len(passage.words) == len(tokens) and set(passage.classes) <= set(CLASSES)


def test_find_words_classifies_every_kind():
    text = "Because the 3 old kings of France were often ill, he 'll go and I won't; 42 men!"
    words = find_words(text)
    expected = {
        "Because": "connective", "the": "determiner", "old": "adjective", "kings": "noun", "of": "preposition",
        "were": "verb", "often": "adverb", ",": "punctuation", "he": "pronoun", "'ll": "verb", "and": "connective",
        "42": "number", "!": "punctuation",
    }  # fmt: skip
    assert {word.text: word.kind for word in words if word.text in expected} == expected
    assert all(text[word.begin : word.begin + len(word.text)] == word.text for word in words)


def test_read_passage_token_inside_a_word_is_no_word():
    tokenizer = byte_tokenizer()
    passage = read_passage(tokenizer, tokenizer(" the\né")["input_ids"])
    assert passage.classes == ["space", "determiner", *["inside a word"] * 2, "space", "inside a word", "noun"]
    assert passage.words[1:4] == ["the"] * 3 and passage.words[4] == "\n"


@pytest.mark.parametrize("method", ["focus", "focus_dual"])
def test_mask_distant_pairs_keeps_those_of_one_group(tiny_model, method):
    model = tiny_model("qwen2")  # its second layer slides over 8 tokens
    torch.manual_seed(2)
    attach(model, method, groups=3, window=6, sinks=1, **({"top_k": 2} if method == "focus_dual" else {}))
    set_routing(model, hard=True)
    masks = {}

    def store(layer, attached, selection, sequence):
        for grouping, rows in split_heads(layer, selection).items():
            masks[grouping] = rows, *mask_distant_pairs(attached, rows, sequence)

    with torch.no_grad(), observe_selections(model, store):
        model(torch.randint(256, (1, 40)))
    heads = model.config.num_key_value_heads if method == "focus_dual" else 1
    assert len(masks) == heads * model.config.num_hidden_layers
    i, j = torch.arange(40)[:, None], torch.arange(40)
    expected = (i - j > 6) & (j >= 1)
    for (layer, head), (selection, distant, kept) in masks.items():
        assert (head is None) == (heads == 1)
        assert torch.equal(distant, expected & (i - j < 8) if layer == 1 else expected)
        same = (selection.query_groups[0].int() @ selection.key_groups[0].int().T) > 0
        assert torch.equal(kept, distant & same) and kept.any()


def test_best_pairs_are_the_highest_with_no_key_twice():
    affinity = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.2, 0.0], [0.3, 0.4, 0.8]])
    kept = torch.tensor([[True, True, False], [True, True, False], [True, True, False]])
    assert best_pairs(affinity, kept, 3) == [(0, 0, pytest.approx(0.9)), (2, 1, pytest.approx(0.4))]
    assert len(best_pairs(affinity, kept, 1)) == 1 and best_pairs(affinity, ~kept, 3)[0][:2] == (2, 2)


def test_find_distinctive_prefers_frequent_tokens_of_one_group():
    tokens = np.array([1] * 20 + [2] * 2 + [3] * 20 + [4] * 20)
    members = np.array([True] * 22 + [False] * 15 + [True] * 5 + [False] * 20)
    assert find_distinctive(tokens, members, 3) == [(1, 20, 20), (2, 2, 2)]
    assert find_distinctive(tokens, members, 1) == [(1, 20, 20)]
    assert find_distinctive(tokens, np.zeros(len(tokens), bool), 3) == []
    # all of one token stand out more than half of another
    tokens, members = np.array([1] * 40 + [2] * 40 + [3] * 400), np.array([True] * 60 + [False] * 420)
    assert find_distinctive(tokens, members, 2) == [(1, 40, 40), (2, 20, 40)]


def make_group(group, metric="group_fraction", layer=0, **cells):
    shared = {"run": "r", "is_causal": True, "model": "m", "data": "d", "word_class": "noun"}
    return Row(source="word groups", metric=metric, layer=layer, group=group, **shared | cells)


LISTED = {"tokens": ["a|b", "␣"], "token_counts": [3, 1], "token_totals": [4, 9]}
GROUPS = to_frame(
    [
        make_group(0, value=0.25, **LISTED),
        make_group(0, "group_purity", value=0.9),
        make_group(0, "class_fraction", value=0.9),
        make_group(0, "class_fraction", value=0.1, word_class="verb"),
        make_group(1, value=0.75, word_class="verb", tokens=["c"], token_counts=[2], token_totals=[5]),
        make_group(0, layer=1, value=1.0, tokens=[], token_counts=[], token_totals=[]),
        *(Row(source="analysis", metric="ami trained", run="r", layer=n, value=v) for n, v in ((0, 0.4), (1, 0.2))),
    ]
)


def test_groups_table_names_each_group_by_its_class():
    groups = describe_groups(GROUPS)
    assert groups[["layer", "group", "size"]].values.tolist() == [[0, 0, 0.25], [0, 1, 0.75], [1, 0, 1.0]]
    table = groups_table(closest_layer(groups))
    assert table.name.tolist() == ["noun (90 %)", "verb (- %)"]
    assert table["tokens (in group/in text)"].tolist() == ["`a|b` 3/4 `␣` 1/9", "`c` 2/5"]
    assert table["size [%]"].tolist() == ["25.0", "75.0"]
    assert (table["noun [%]"].tolist(), table["verb [%]"].tolist()) == (["90", "-"], ["10", "-"])


def test_pairs_table_has_the_words_of_the_run_next_to_the_papers():
    pair = {"source": "pairs", "run": "r", "is_causal": True, "layer": 3, "query": 9, "key": 2}
    rows = [
        Row(**pair, value=0.5, query_word="sees", key_word="king"),
        Row(**pair | {"query": 8}, value=0.7, query_word="\n", key_word="and"),
    ]
    table = pairs_table(list_pairs(to_frame(rows)))
    assert table.of.tolist() == ["paper", "paper", "ours", "ours"]
    assert table["word"].tolist()[2:] == ["`and` (2)", "`king` (2)"]
    assert table["later word"].tolist()[2:] == ["`\\n` (8)", "`sees` (9)"]
    assert len(list_pairs(to_frame([]))) == 0


def test_draw_passage_colours_each_token_by_its_group():
    texts = ["The", " <king>", "\n", " x" * 60]
    passage = Row(source="passage", run="r", layer=0, model="m", data="d", token_texts=texts, token_groups=[0, 1, 0, 1])
    drawing = ElementTree.fromstring(draw_passage(passage, GROUPS))
    kinds = [element.tag.rpartition("}")[2] for element in drawing]
    words = [element for element in drawing if element.get("textLength")]
    assert [word.text for word in words] == ["The", " <king>", "↵", " x" * 60]
    assert kinds.count("rect") == 1 + 2 + 4  # background, legend, tokens
    fills = [rect.get("fill") for rect in drawing if rect.get("fill-opacity")]
    assert fills[2:] == [fills[0], fills[1], fills[0], fills[1]]
    tops = [float(word.get("y")) for word in words]
    assert tops[0] == tops[1] == tops[2] < tops[3]
    legend = [element.text for element in drawing if element.tag.endswith("text") and not element.get("textLength")]
    assert legend[2:] == ["0: noun (90 %)", "1: verb (- %)"]


def measured(folder: Path) -> pd.DataFrame:
    """The measurements of the only run below a directory, settings as columns."""
    return pd.DataFrame([{**vars(m), **m.settings} for m in record_of(folder).measurements])


def test_analysis_of_an_adapter_and_a_copy_equals_observations(finished_run, tmp_path, monkeypatch):
    adapter = only_run(finished_run) / "adapter"
    other = shutil.copytree(adapter, tmp_path / "other")
    observations, observe, runs = {}, GroupAnalysis.observe, tmp_path / "runs"
    monkeypatch.setattr(GroupAnalysis, "observe", lambda self, name: observations.setdefault(name, observe(self, name)))
    others = f"analyze.others=['{other}']"
    succeed(*without_attention(tiny(tmp_path)), "job=analyze", f"adapter={adapter}", others)
    rows, folder = measured(runs), only_run(runs)
    values = rows.set_index("metric").value
    facts = rows[rows.metric == "analyzed_tokens"].iloc[0]
    assert (facts.tokens, facts.windows, facts.passage_tokens) == (96, 3, 24)
    assert values["word_class_fraction"].sum() == pytest.approx(1.0)
    trained, base = (observations[name] for name in ("trained router", "full attention"))
    assert sorted(rows.layer.dropna().unique()) == [grouping.layer for grouping in trained.groups]
    for grouping, members in trained.groups.items():
        layer = rows[rows.layer == grouping.layer].set_index("metric")
        assert layer.value["group_fraction"].tolist() == pytest.approx([(members == g).mean() for g in range(2)])
        classes = layer.loc[["class_fraction"]].groupby("group").value.sum()
        assert classes.tolist() == pytest.approx([1.0] * len(classes)) and len(classes) == len(np.unique(members))
        for row in layer.loc[["group_fraction"]].itertuples():
            assert len(row.tokens) == len(row.token_counts) == len(row.token_totals)
            assert all(0 < count <= total for count, total in zip(row.token_counts, row.token_totals, strict=True))
        assert layer.value["layer_confidence"] == pytest.approx(trained.confidence[grouping].mean())
        agreement = layer.loc["router_agreement"].set_index("router").value
        assert agreement["trained_0"] == pytest.approx(1.0)  # a copy
        assert agreement["untrained"] < 0.9 and abs(agreement["chance"]) < 0.2
        assert set(layer.router["purity"]) == {"trained", "untrained", "chance"}
        assert 0 < layer.value["passage_distant_density"] < 1
        pairs = layer.loc[["pair_affinity"]]
        assert len(pairs) <= 4 and ((pairs["query"] - pairs.key > 8) & (pairs.key >= 1)).all()
    changes = rows[rows.metric == "class_nll_change"].set_index("word_class")
    first = 11  # predicted by query 10, whose distance to the first key after the sink is 9
    assert changes.n["all"] == 3 * (32 - first) == changes.n.drop("all").sum()
    assert changes.value["all"] == pytest.approx((trained.nll - base.nll)[:, first:].mean(), abs=1e-6)
    passage = rows[rows.metric == "passage_groups"].iloc[0]
    routed = next(groups for grouping, groups in trained.groups.items() if grouping.layer == passage.layer)
    assert passage.token_groups == routed[1][:24].tolist() and len(passage.token_texts) == 24
    agreement = rows[(rows.metric == "ami") & (rows.router == "trained")].set_index("layer").value
    assert agreement[passage.layer] == agreement.max()
    table = (folder / "table.md").read_text()
    assert all(f"## {name}" in table for name in ("Groups by word class", "Pairs", "Cost by word class"))
    assert (folder / "figures" / "passage.svg").read_text().count("textLength") >= 24
    results = load_results(runs).rows
    assert set(results[results.source == "groups"].metric) >= {"punctuation_purity", "group_confidence"}


def test_analysis_with_a_window_wider_than_the_passage_prunes_nothing(tmp_path):
    succeed(*tiny(tmp_path), *JOB, "attention.window=40")
    rows = measured(tmp_path)
    assert not {"pair_affinity", "class_nll"} & set(rows.metric)
    assert rows[rows.metric == "passage_distant_density"].value.isna().all()


def test_analysis_describes_heads_with_groups_of_their_own(tmp_path):
    groups = ["attention.groups=3", "attention.top_k=1", "attention.groups_per_layer=[1,[0,2]]"]
    succeed(*fitting(*tiny(tmp_path), "job=analyze", *DUAL, *groups))
    rows = measured(tmp_path)
    density = rows[rows.metric == "passage_distant_density"].set_index(["layer", "head"]).value
    assert density.index.tolist() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # a head that reads no group loses all of its distant pairs
    assert density[1, 0] == 0 and density.drop((1, 0)).between(0, 1, inclusive="neither").all()
