"""job=analyze: every measure by its definition, attention against transformers' own, the page for any text."""

import json
import math
import shutil
import signal
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_assignment
from running import fitting, only_run, record_of, router_steps, run, tiny
from safetensors.torch import load_file, save_file
from sklearn.metrics import adjusted_mutual_info_score

from focus_exp import attach, detach, set_routing
from focus_exp.attention.base import LayerShape
from focus_exp.attention.dense import reference_attention
from focus_exp.attention.selection import AttentionArgs, Sequence, select
from focus_exp.evaluation.groups import GroupAnalysis, letter
from focus_exp.evaluation.groups_metrics import agreement, counts, fit, purity, shuffled, standing_out
from focus_exp.evaluation.groups_observe import Grouping, Observed, groupings, read_observed, write_observed
from focus_exp.evaluation.groups_pairs import best_pairs, cut_cost, layer_content
from focus_exp.evaluation.groups_passage import LISTED, Cut, CutMass, CutProbe, cut_passage
from focus_exp.evaluation.groups_words import CLASSES, Passage, find_words, read_passage, shown, text_pieces
from focus_exp.models.adapter import WEIGHTS
from focus_exp.models.random import byte_tokenizer
from focus_exp.reporting.load import load_results
from focus_exp.training.precision import choose_precision

JOB = ["job=analyze", "recipe.steps=2"]
labelled = st.integers(2, 40).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 4), min_size=n, max_size=n).map(np.array)] * 2)
)


def entropy(*columns: np.ndarray) -> float:
    shares = np.array(list(Counter(zip(*columns, strict=True)).values())) / len(columns[0])
    return float(-(shares * np.log(shares)).sum())


@given(labelled)
@settings(max_examples=50)
def test_purity_and_mutual_information_are_what_they_are_defined_as(problem):
    groups, labels = problem
    most = [Counter(labels[groups == g].tolist()).most_common(1)[0][1] for g in set(groups.tolist())]
    found = fit(groups, labels)
    assert found.purity == pytest.approx(sum(most) / len(groups))
    mutual = entropy(groups) + entropy(labels) - entropy(groups, labels)
    mean = (entropy(groups) + entropy(labels)) / 2
    assert found.nmi == pytest.approx(mutual / mean if mean else 1.0, abs=1e-9)
    assert found.ami == pytest.approx(adjusted_mutual_info_score(labels, groups))
    assert counts(groups, labels).sum() == len(groups)


def test_adjusted_information_takes_off_what_every_order_of_the_groups_would_give():
    groups, labels = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 0, 0, 1, 1, 2])
    base = entropy(groups) + entropy(labels)
    expected = np.mean([base - entropy(np.array(order), labels) for order in permutations(groups.tolist())])
    mutual = base - entropy(groups, labels)
    assert fit(groups, labels).ami == pytest.approx((mutual - expected) / (base / 2 - expected))


@given(labelled, st.permutations(range(5)))
@settings(max_examples=50)
def test_agreement_does_not_hang_on_the_names_of_groups(problem, names):
    groups, _ = problem
    assert agreement(groups, np.array(names)[groups]) == pytest.approx(1.0)


@given(labelled, st.integers(0, 9))
@settings(max_examples=50)
def test_chance_has_the_same_sizes(problem, seed):
    groups, labels = problem
    drawn = shuffled(groups, seed)
    assert Counter(drawn.tolist()) == Counter(groups.tolist())
    # and no group can be purer than its label is frequent, unless it ignores nothing
    assert purity(drawn, labels) >= max(Counter(labels.tolist()).values()) / len(labels) - 1e-9


def test_what_stands_out_adds_up_to_the_divergence():
    inside, everywhere = Counter(a=6, b=3, c=1), Counter(a=10, b=30, c=1, d=59)
    # 6 log 6, 3 log 1, 1 log 10
    assert standing_out(inside, everywhere, 3) == ["a", "c", "b"]
    assert standing_out(inside, everywhere, 1) == ["a"]
    assert standing_out(Counter(), everywhere, 3) == []


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
@settings(max_examples=50)
def test_pieces_are_the_text_and_characters_stand_at_their_last_byte(text):
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    pieces = text_pieces(tokenizer, tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == tokenizer.decode(tokens)
    if "�" not in text:
        assert [len(piece) for piece in pieces if piece] == [1] * len(text)
    read = read_passage(tokenizer, tokens)
    assert len(read.classes) == len(read.words) == len(tokens) and set(read.classes) <= set(CLASSES)
    assert all(shown(piece).strip() for piece in pieces)


def test_words_of_every_class_are_told_apart():
    text = "Because the 3 old kings of France were often ill, he 'll go and I won't; 42 men!"
    kinds = {word.text: word.kind for word in find_words(text)}
    expected = {
        "Because": "connective", "the": "determiner", "old": "adjective", "kings": "noun", "of": "preposition",
        "were": "verb", "often": "adverb", ",": "punctuation", "he": "pronoun", "'ll": "verb", "and": "connective",
        "42": "number", "!": "punctuation",
    }  # fmt: skip
    assert {word: kinds[word] for word in expected} == expected
    for word in find_words(text):
        assert text[word.begin : word.begin + len(word.text)] == word.text


def test_a_token_that_goes_on_with_a_word_is_no_word():
    tokenizer = byte_tokenizer()
    read = read_passage(tokenizer, tokenizer(" the\né")["input_ids"])
    assert read.classes == ["space", "determiner", *["inside a word"] * 2, "space", "inside a word", "noun"]
    assert [shown(piece) for piece in ("", " ", " \n", " a ")] == ["(part of a character)", "␣", "␣\\n", "a"]
    assert read.words[1:4] == ["the"] * 3 and read.words[4] == "\\n"


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "giant", "empty"])
def test_mass_and_pairs_are_those_of_the_definition(kind, top_k):
    torch.manual_seed(top_k)
    length, window, sinks = 23, 4, 2
    q, k, v = (torch.randn(1, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2))
    selection = select(random_assignment(kind, 1, length, 4), top_k, "share")
    probe = CutProbe(LayerShape(32, 4, 8, 0), window, sinks, groupings(0, selection))
    sequence = Sequence.plain(1, length)
    out = probe.attend(q, k, v, selection, sequence, AttentionArgs(0.3))
    everything = select(torch.ones(1, length, 1, dtype=torch.float64), 1, "share")
    torch.testing.assert_close(
        out, reference_attention(q, k, v, everything, sequence, AttentionArgs(0.3, window=window, sinks=sinks))
    )
    lies = probe.masses[Grouping(0)]
    scores = 0.3 * q[0] @ k[0].repeat_interleave(2, 0).transpose(-1, -2)
    mass = torch.stack([s.tril().masked_fill(~torch.ones_like(s).tril().bool(), -math.inf) for s in scores])
    mass = mass.softmax(-1).mean(0)
    g, distant, affinities, lost = selection.assignment[0], 0, [], [0.0] * length
    for i in range(length):
        parts: dict[str, list[tuple[float, int]]] = {"near": [], "kept": [], "cut": []}
        for j in range(i + 1):
            shared = bool((selection.query_groups[0, i] & selection.key_groups[0, j]).any())
            part = "near" if i - j <= window or j < sinks else "kept" if shared else "cut"
            parts[part].append((float(mass[i, j]), j))
            distant += part != "near"
            affinities += [float(g[i] @ g[j])] if part == "kept" else []
        for name, found in parts.items():
            assert float(getattr(lies, name)[i]) == pytest.approx(sum(m for m, _ in found), abs=1e-12)
        for name in ("kept", "cut"):
            indices, masses, affinity = (part[i] for part in getattr(lies, f"{name}_keys"))
            heaviest = sorted(parts[name], reverse=True)[:LISTED]
            assert [
                (pytest.approx(m), j) for m, j in zip(masses.tolist(), indices.tolist(), strict=True) if m
            ] == heaviest
            for (_, j), a in zip(heaviest, affinity.tolist(), strict=False):
                assert a == pytest.approx(float(g[i] @ g[j]))
        closest = max((float(g[i] @ g[j]) for _, j in parts["kept"]), default=-1.0)
        assert float(lies.close_keys[2][i, 0]) == pytest.approx(closest)
        for _, j in parts["cut"]:
            lost[j] += float(mass[i, j])
    assert lies.cut_by_key.tolist() == pytest.approx(lost)
    assert lies.distant_pairs == distant
    assert sorted(lies.kept_affinities.tolist()) == pytest.approx(sorted(affinities))


@pytest.mark.parametrize("method", ["focus", "focus_dual"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2"])
def test_attention_that_was_cut_is_the_bases_own(tiny_model, family, method):
    """Against the weights that transformers itself gives."""
    model = tiny_model(family, torch.float64)
    tokens = torch.randint(256, (40,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    attach(model, method, groups=3, window=6, sinks=1, **({"top_k": 2} if method == "focus_dual" else {}))
    set_routing(model, hard=True)
    precision = choose_precision("float32", "cpu", False)
    cut = cut_passage(model, tokens, precision)
    with torch.no_grad():
        hard = model(tokens[None], use_cache=False).logits[0]
    detach(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        base = model(tokens[None], use_cache=False, output_attentions=True)
    for losses, logits in ((cut.nll_full, base.logits[0]), (cut.nll_hard, hard)):
        logs = logits.log_softmax(-1)[:-1]
        torch.testing.assert_close(losses[1:].double(), -logs[torch.arange(39), tokens[1:]], atol=1e-4, rtol=1e-4)
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads) if method == "focus_dual" else 1
    assert len(cut.masses) == heads * config.num_hidden_layers
    for (layer, head), lies in cut.masses.items():
        assert (head is None) == (heads == 1)
        mass = base.attentions[layer][0].unflatten(0, (heads, -1)).mean(1)[head or 0]
        selection = cut.selections[Grouping(layer, head)]
        shared = (selection.query_groups[0].int() @ selection.key_groups[0].int().T) > 0
        i, j = torch.arange(40)[:, None], torch.arange(40)
        far = (i - j > 6) & (j >= 1)
        torch.testing.assert_close(lies.cut, (mass * (far & ~shared)).sum(-1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(lies.kept, (mass * (far & shared)).sum(-1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(lies.near + lies.kept + lies.cut, torch.ones(40, dtype=torch.float64))
        affinity = selection.assignment[0] @ selection.effective_key_assignment[0].T
        # where a sliding layer sees nothing there is no pair
        closest = affinity.masked_fill(~(far & shared & (mass > 0)), -1.0).max(-1).values
        torch.testing.assert_close(lies.close_keys[2][:, 0], closest)
    assert any(float(lies.cut.max()) > 0 for lies in cut.masses.values())


@given(st.data())
@settings(max_examples=50)
def test_listed_pairs_are_the_highest_with_no_key_twice(data):
    length, number = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 6))
    values = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.2, 0.5, 0.9]), min_size=length, max_size=length)
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=length, max_size=length))
    mass, affinity = data.draw(values), data.draw(values)
    keys = tuple(torch.tensor(part)[:, None] for part in (indices, mass, affinity))
    words = Passage([], [], [f"w{i}" for i in range(length)])
    for by, measure in (("mass", mass), ("affinity", affinity)):
        wanted, taken = [], set()
        for query in sorted(range(length), key=lambda i: -measure[i]):
            if measure[query] > 0 and indices[query] not in taken and len(wanted) < number:
                wanted.append((query, indices[query]))
                taken.add(indices[query])
        pairs = best_pairs(keys, by, number, words)
        assert [(pair.query, pair.key) for pair in pairs] == wanted
        assert all(pair.query_word == f"w{pair.query}" and pair.by == by for pair in pairs)


def losing(cut: torch.Tensor) -> CutMass:
    nothing = (torch.zeros(0),) * 3
    return CutMass(1 - cut, 0 * cut, cut, nothing, nothing, nothing, torch.zeros(0), 0, torch.zeros(0))


def test_the_correlation_pairs_a_query_with_the_token_it_predicts():
    lost = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.9])
    rise = torch.tensor([9.0, 9.0, 1.0, 2.0, 3.0, 4.0])  # query i predicts token i + 1
    cut = Cut(torch.zeros(6), rise, {}, {Grouping(0): losing(lost)})
    assert cut_cost(cut) == pytest.approx(1.0)
    assert cut_cost(Cut(torch.zeros(6), -rise, {}, {Grouping(0): losing(lost)})) == pytest.approx(-1.0)
    assert cut_cost(Cut(torch.zeros(6), torch.zeros(6), {}, {Grouping(0): losing(torch.zeros(6))})) is None


def test_groups_that_a_query_reaches_beyond_its_own_are_on_the_page():
    torch.manual_seed(0)
    for top_k in (1, 2):
        selection = select(random_assignment("plain", 1, 9, 4), top_k, "query_topk")
        probe = CutProbe(LayerShape(8, 1, 8, 0), 1, 0, groupings(0, selection))
        q = torch.randn(1, 1, 9, 8)
        probe.attend(q, q, q, selection, Sequence.plain(1, 9), AttentionArgs(1.0))
        content = layer_content(Grouping(0), Cut(torch.zeros(9), torch.zeros(9), probe.selections, probe.masses))
        assert ("query_groups" in content) == (top_k == 2)
        if top_k == 2:
            assert all(len(groups) == 2 for groups in content["query_groups"])
            assert content["key_groups"] == [[group] for group in content["groups"]]


def test_what_was_observed_is_read_back_or_not_at_all(tmp_path):
    places = [Grouping(7), Grouping(8, 1)]
    found = Observed(np.zeros((2, 2, 3), np.int16), np.ones((2, 2, 3), np.float32), np.zeros((2, 3)), places)
    path = tmp_path / "trained.npz"
    assert read_observed(path) is None
    write_observed(path, found)
    again = read_observed(path)
    assert again.groupings == places
    assert all((again.groups_of(own) == 0).all() and (again.confidence_of(own) == 1).all() for own in places)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_observed(path) is None


def test_letters_name_groups():
    assert [letter(n) for n in (0, 25, 26, 63)] == ["A", "Z", "A1", "L2"]


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory) -> Path:
    """Where a job on the adapter of a short run left everything, that adapter among the others."""
    folder = tmp_path_factory.mktemp("groups")
    assert run(*tiny(folder, "trained"), router_steps(2)).code == 0
    adapter = only_run(folder / "trained") / "adapter"
    result = run(*tiny(folder), "job=analyze", f"adapter={adapter}", f"analyze.others=['{adapter}']")
    assert result.code == 0, result.err
    return folder


def test_the_record_holds_what_the_tables_say(analyzed):
    record = record_of(analyzed / "runs")
    groups = record.groups
    assert (groups.tokens, groups.windows, groups.passage_tokens) == (96, 3, 24)
    assert sum(groups.class_shares.values()) == pytest.approx(1.0)
    assert [row.layer for row in groups.layers] == record.layers
    observed = read_observed(only_run(analyzed / "runs") / "groups" / "trained.npz")
    for row in groups.layers:
        members = observed.groups_of(Grouping(row.layer)).ravel()
        assert [group.share for group in row.groups] == pytest.approx([(members == g).mean() for g in range(2)])
        assert row.confidence == pytest.approx(observed.confidence_of(Grouping(row.layer)).mean())
        # the other router is the same one
        assert row.agreement == [pytest.approx(1.0)]
        assert row.agreement_untrained < 0.9 and abs(row.agreement_chance) < 0.2
        assert {fit.router for fit in row.fits} == {"trained", "untrained", "chance"}
        assert row.near_mass + row.kept_mass + row.cut_mass == pytest.approx(1.0, abs=1e-5)
        assert row.distant_mass_kept == pytest.approx(row.kept_mass / (row.kept_mass + row.cut_mass))
        assert 0 < row.distant_pairs_kept < 1 and len(row.pairs) <= 4
        assert all(pair.query - pair.key > 8 and pair.key >= 1 for pair in row.pairs)
    everything = groups.costs[0]
    assert everything.word_class == "all" and everything.tokens == 3 * (32 - 10)
    base = read_observed(only_run(analyzed / "runs") / "groups" / "base.npz")
    assert everything.delta == pytest.approx((observed.nll - base.nll)[:, 10:].mean(), abs=1e-6)
    assert sum(cost.tokens for cost in groups.costs[1:]) <= everything.tokens
    table = (only_run(analyzed / "runs") / "table.md").read_text()
    assert "## Groups" in table
    assert "## Cost by word class" in table
    assert "Substitute" not in table
    results = pd.DataFrame(map(vars, load_results(analyzed / "runs").rows))
    assert set(results[results.source == "groups"].metric) >= {"punctuation_purity", "group_confidence"}


def test_an_analysis_of_another_router_than_the_one_that_is_there_is_refused(analyzed, tmp_path):
    adapter = only_run(analyzed / "trained") / "adapter"
    other = shutil.copytree(adapter, tmp_path / "other")
    command = [*tiny(tmp_path), "job=analyze", f"adapter={adapter}", f"analyze.others=['{other}']"]
    assert run(*command).code == 0 and "finished already" in run(*command).out
    path = only_run(tmp_path / "runs") / "record.json"
    record = path.read_text()
    weights = load_file(other / WEIGHTS)
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / WEIGHTS)
    for status in ("interrupted", "finished"):
        path.write_text(record.replace('"finished"', f'"{status}"'))
        refused = run(*command)
        assert refused.code == 2 and f"analyze.others={other} holds another adapter than when" in refused.err
    shutil.rmtree(other)
    assert "finished already" in run(*command).out
    shutil.copytree(adapter, other)
    values = json.loads(record)
    del values["method"]["others"]  # as versions before wrote it
    path.write_text(json.dumps(values))
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / WEIGHTS)
    assert "finished already" in run(*command).out


def test_an_interrupted_analysis_goes_on_with_the_next_router(tmp_path, monkeypatch):
    real, calls = GroupAnalysis.observe, []

    def stopping(self, label):
        calls.append(label)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(self, label)

    monkeypatch.setattr(GroupAnalysis, "observe", stopping)
    assert run(*tiny(tmp_path), *JOB).code == 128 + signal.SIGTERM
    assert run(*tiny(tmp_path), *JOB).code == 0
    assert calls == ["trained router", "full attention", "full attention", "untrained router"]
    assert "finished already" in run(*tiny(tmp_path), *JOB).out and len(calls) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["attention=window", "recipe=none"], "not attention=window"),
        (["analyze.passage_tokens=33"], "analyze.passage_tokens=33 exceeds eval.seq_len=32"),
        (["analyze.others=[nowhere]"], "nowhere holds no focus_adapter.json"),
        (["analyze.tokens=1"], "analyze.tokens=1"),
    ],
    ids=str,
)
def test_bad_settings_are_one_message(tmp_path, settings, said):
    result = run(*fitting(*tiny(tmp_path), *JOB, *settings))
    assert result.code == 2 and said in result.err and "Traceback" not in result.err


def test_a_window_wider_than_the_passage_cuts_nothing(tmp_path):
    result = run(*tiny(tmp_path), *JOB, "attention.window=40")
    assert result.code == 0, result.err
    groups = record_of(tmp_path).groups
    assert all(row.pairs == [] and row.distant_pairs_kept is None and row.cut_mass == 0 for row in groups.layers)
    assert groups.costs == [] and groups.cut_cost is None


@pytest.mark.parametrize(
    ("settings", "future"),
    [(["attention=focus_paper"], True), (["attention.top_k=2", "attention.pair_rule=share"], False)],
    ids=["focus_paper", "top_k=2"],
)
def test_any_router_is_described_and_one_that_reads_the_future_is_named(tmp_path, settings, future):
    result = run(*tiny(tmp_path), *JOB, "attention.groups=5", *settings)
    assert result.code == 0, result.err
    assert ("Non-causal router" in (only_run(tmp_path) / "table.md").read_text()) == future
    for layer in json.loads((only_run(tmp_path) / "groups" / "passage.json").read_text())["layers"]:
        assert len(layer["query_groups"]) == len(layer["key_groups"]) == 24


def test_heads_with_groups_of_their_own_are_described_each(tmp_path):
    fitted = [
        "attention=focus_dual",
        "recipe=none",
        "attention.calibration_sequences=4",
        "attention.validation_sequences=2",
    ]
    fitted += [
        "attention.fit_steps=8",
        "attention.groups=3",
        "attention.top_k=1",
        "attention.groups_per_layer=[1,[0,2]]",
    ]
    result = run(*fitting(*tiny(tmp_path), "job=analyze", *fitted))
    assert result.code == 0, result.err
    record, folder = record_of(tmp_path), only_run(tmp_path)
    assert [(row.layer, row.head) for row in record.groups.layers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # a head that reads no group loses all of its distant attention
    lost = record.groups.layers[2]
    assert lost.kept_mass == 0 and lost.distant_pairs_kept == 0 and lost.cut_mass > 0
    assert all(0 < row.distant_pairs_kept < 1 for i, row in enumerate(record.groups.layers) if i != 2)
    page = (folder / "passage.html").read_text()
    assert page.count("<details>") == 4 and "layer 1, head 0" in page
    assert "## Groups" in (folder / "table.md").read_text()


def test_a_budget_that_leaves_no_groups_is_one_message(tmp_path):
    settings = ["attention=focus_dual", "recipe=none", "attention.calibration_sequences=0", "attention.top_k=1"]
    settings.append("attention.groups_per_layer=[full,window]")
    result = run(*fitting(*tiny(tmp_path), "job=analyze", *settings))
    assert result.code == 2 and "leaves no layer with groups" in result.err and "Traceback" not in result.err
