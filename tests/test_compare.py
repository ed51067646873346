"""job=compare: every variant is a run, and the comparison is one table of them."""

import signal
from dataclasses import replace

import numpy as np
import pytest
from builders import find_inconsistent, primary, stop_training, write_comparison, write_variant, write_variants
from conftest import build
from running import fitting, only_run, records_of, run, succeed, tiny, without_attention, write_texts
from scipy import stats

from focus_exp.evaluation import benchmarks, perplexity
from focus_exp.evaluation.variants import slug
from focus_exp.models.random import byte_tokenizer
from focus_exp.reporting.frame import filter_rows, to_rows
from focus_exp.reporting.load import load_results, load_run
from focus_exp.results.losses import read_losses
from focus_exp.results.record import Record

FIXED = ["attention=window", "recipe=none", "eval.tasks=[]"]
VARIANTS = {
    "focus": ["recipe.steps=2"],
    "lora": ["attention=full", "recipe=lora", "recipe.steps=2"],
    "window": ["attention=window", "recipe=none"],
}
MEASURED = {"k_1": ["eval.top_k=[1]"], "k_2": ["attention.top_k=2", "eval.top_k=[2]"]}
BROKEN = VARIANTS | {"lost": ["data.files=nowhere"]}


def settings(folder, **variants):
    return write_comparison(folder / "conf", tiny(folder), variants or VARIANTS)


def records(folder):
    """Return variant -> record; the comparison's is at None."""
    return {record.config["variant"]: record for record in records_of(folder / "runs")}


def rows_by_variant(folder, metric="perplexity"):
    """Return variant -> its row in the table of the comparison; the base's is at None."""
    rows = load_run(records(folder)[None].path.parent).rows
    measured = to_rows(filter_rows(rows, {"metric": metric, "source": "rows"}))
    return {row.variant: row for row in measured if row.primary or row.kind == "base"}


def nll_changes(folder):
    """Return the paired changes between variants in the table of the comparison."""
    rows = load_run(records(folder)[None].path.parent).rows
    changes = to_rows(filter_rows(rows, {"metric": "nll_change", "source": "rows", "primary": True}))
    return {(row.variant, row.reference): row for row in changes if row.reference not in ("base", "soft")}


@pytest.fixture
def scored(monkeypatch):
    """Return the names of what is scored."""
    real, labels = perplexity.score, []
    monkeypatch.setattr(perplexity, "score", lambda *arguments: labels.append(arguments[-1]) or real(*arguments))
    return labels


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the folder and the output of a comparison, one of whose variants fails."""
    folder = tmp_path_factory.mktemp("compare")
    result = run(*settings(folder, **BROKEN), "references=[lora,gone]")
    assert result.code == 2 and "variants failed: lost (1 of 4)" in result.err
    return folder, result.out


def test_compare_every_variant_is_a_run_and_a_row(compared):
    folder, out = compared
    loaded, rows = records(folder), rows_by_variant(folder)
    comparison = loaded.pop(None)
    assert list(rows) == [None, *VARIANTS] and set(loaded) == set(BROKEN)
    for variant in comparison.variants[:3]:
        record = loaded[variant.name]
        assert rows[variant.name].value == primary(record).perplexity
        assert rows[variant.name].sparsity == primary(record).sparsity
        assert variant.settings[-len(VARIANTS[variant.name]) :] == VARIANTS[variant.name]
        assert variant.started == record.started
        assert record.model["fingerprint"] == loaded["focus"].model["fingerprint"]
    assert {row.kind for row in rows.values()} == {"base", "hard", "trained", "control"}
    assert "variant 1 of 4: focus" in out and "ΔPPL [%], focus" in out and "random_size_matched" in out
    assert loaded["lora"].tokens_seen == loaded["focus"].tokens_seen - 2 * 32  # warm start and balance


def test_compare_folder_is_named_after_the_model_that_runs(tmp_path):
    command = [setting for setting in settings(tmp_path, window=VARIANTS["window"]) if setting != "model=tiny_llama"]
    write_variant(tmp_path / "conf" / "variant" / "adhoc" / "shared.yaml", ["model=tiny_gpt2"])
    succeed(*command)
    for name in ("window", "focus-compare"):
        assert list((tmp_path / "runs").glob(f"adhoc/tiny_gpt2-*/{name}-seed0-*/record.json"))


def test_compare_changes_follow_from_the_losses(compared):
    folder, _ = compared
    losses, published = {}, {}
    for name in VARIANTS:
        (path,) = folder.glob(f"runs/adhoc/*/{name}-seed*")
        record = Record.load(path / "record.json")
        row = primary(record)
        (scores,) = [p for p in path.rglob("*.npz") if p.stem == slug(row.name)]
        with np.load(scores) as arrays:
            losses[name] = arrays["nll"].astype(np.float64)
        (csv,) = path.rglob("losses.csv")
        published[name] = read_losses(csv)["text"].nll[row.name]
        assert find_inconsistent(record) == []
    changes = nll_changes(folder)
    forward = {pair for pair, row in changes.items() if not row.reversed}
    assert forward == {("lora", "focus"), ("window", "focus"), ("window", "lora")}
    assert changes.keys() == forward | {pair[::-1] for pair in forward}
    for (name, reference), row in changes.items():
        assert row.value == pytest.approx(np.nanmean(losses[name] - losses[reference]), abs=1e-7)
        # sequences of one document, all of the same length
        interval = stats.ttest_rel(published[name], published[reference]).confidence_interval()
        assert (row.low, row.high) == pytest.approx(tuple(interval), abs=1e-9)


def test_compare_failed_variant_keeps_its_reason_and_is_run_again(compared):
    folder, _ = compared
    variants = records(folder)[None].variants
    assert [variant.status for variant in variants] == ["finished"] * 3 + ["failed"]
    assert "nowhere" in variants[-1].error
    again = run(*settings(folder, **BROKEN), "references=[lora,gone]")
    assert "variant 1 of 1: lost" in again.out and "already finished: focus, lora, window" in again.out
    assert again.code == 2 and "variants failed: lost (1 of 4)" in again.err


@pytest.mark.slow
def test_compare_pairs_variants_of_the_same_text_and_model(tmp_path):
    other = write_texts(tmp_path / "others", words=170)
    fixed, random = ["attention=window", "recipe=none"], ["attention=random_groups", "recipe=none"]
    variants = {
        "here": fixed, "there": [*fixed, f"data.files={other}"], "larger": [*fixed, "model=tiny_gpt2"],
        "there_too": [*random, f"data.files={other}"],
    }  # fmt: skip
    succeed(*settings(tmp_path, **variants), "references=[there_too,larger]")
    rows = rows_by_variant(tmp_path, "nll")
    changes = {pair: row.value for pair, row in nll_changes(tmp_path).items()}
    expected = pytest.approx(rows["there_too"].value - rows["there"].value, abs=1e-6)
    assert changes["there_too", "there"] == expected
    assert changes["there", "there_too"] == -changes["there_too", "there"] and len(changes) == 2
    pair = {"metric": "nll_change", "reference": "there", "variant": "there_too"}
    (row,) = to_rows(filter_rows(load_results(tmp_path / "runs").complete, pair))
    assert row.n_units == primary(records(tmp_path)["there_too"]).changes["base"].n


@pytest.mark.parametrize(
    ("name", "settings_of_variant"),
    [
        ("key", ["attention.groops=3"]),
        ("method", ["attention=sparq"]),
        ("file", ["attention=nothing"]),
        ("base", []),
        ("unmodified", ["attention=full", "recipe=none"]),
    ],
)
def test_compare_mistake_in_any_variant_is_refused_before_any_runs(tmp_path, name, settings_of_variant):
    result = run(*settings(tmp_path, focus=[], **{name: settings_of_variant}))
    assert result.code == 2 and result.err.startswith(f"error: variant {name}: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_compare_adapter_is_measured_by_every_variant(tmp_path, scored):
    succeed(*tiny(tmp_path / "router"), "recipe.steps=2", "recipe.warmup_steps=1")
    adapter = only_run(tmp_path / "router") / "adapter"
    command = [*without_attention(tiny(tmp_path)), "job=compare", f"adapter={adapter}"]
    command += write_variants(tmp_path / "conf", MEASURED)
    result = succeed(*command)
    loaded = records(tmp_path)
    assert [record.steps for record in loaded.values()] == [0, 0, 0] and "training" not in result.err
    assert scored.count("base") == 2  # once by the run that trained it, whose cache is another
    soft = [loaded[name].find("nll", "focus_soft") for name in MEASURED]
    assert soft[0] == soft[1]
    hard = {name: primary(loaded[name]) for name in MEASURED}
    assert hard["k_1"].sparsity > hard["k_2"].sparsity == 0  # of two groups
    assert [row.top_k for row in rows_by_variant(tmp_path).values()] == [None, 1, 2]
    assert "already finished" in run(*command).out

    another = write_variants(tmp_path / "conf", {**MEASURED, "window": ["attention=window", "recipe=none"]})
    wrong = run(*command, another[-1])
    assert wrong.code == 2 and wrong.err.startswith("error: variant window: attention must be focus")


def test_compare_interrupted_resumes_at_its_variant(tmp_path, monkeypatch):
    command = settings(tmp_path, one=FIXED, two=["recipe.steps=2"])
    with monkeypatch.context() as patch:
        stop_training(patch, 1)
        assert run(*command).code == 128 + signal.SIGTERM
    stopped = {name: record.status for name, record in records(tmp_path).items()}
    assert stopped == {"one": "finished", "two": "interrupted"}
    result = run(*command)
    assert result.code == 0 and "variant 1 of 1: two" in result.out
    assert all(arm.status == "finished" for arm in records(tmp_path)[None].variants)


@pytest.mark.slow
def test_compare_sweep_of_variants_equals_the_comparison(tmp_path, scored):
    command = without_attention(settings(tmp_path))  # whose options full attention does not have
    succeed("-m", *command, "+variant=adhoc/focus,adhoc/lora,adhoc/window", "hydra/launcher=basic")
    alone = records(tmp_path)
    assert set(alone) == set(VARIANTS) and scored.count("base") == 1
    assert "already finished: focus, lora, window" in run(*command).out
    rows = rows_by_variant(tmp_path)
    assert [rows[name].value for name in VARIANTS] == [primary(alone[name]).perplexity for name in VARIANTS]


@pytest.mark.slow
def test_compare_base_is_measured_once_per_text(tmp_path, scored):
    wider, longer = [*VARIANTS["focus"], "eval.top_k=[2]"], [*VARIANTS["window"], "eval.seq_len=48"]
    other = {**VARIANTS, "wider": wider, "narrow": [*VARIANTS["window"], "attention.window=4"], "longer": longer}
    run(*settings(tmp_path, **other))
    assert scored.count("base") == 2
    assert not [pair for pair in nll_changes(tmp_path) if "longer" in pair]
    overwritten = run(*settings(tmp_path, **other), "overwrite=true")
    assert "variant 6 of 6: longer" in overwritten.out


def test_report_leaves_out_a_variant_that_was_repeated_since(tmp_path):
    succeed(*settings(tmp_path, one=["attention=window", "recipe=none"], two=["attention=sparq", "recipe=none"]))
    loaded, pair = records(tmp_path), {"metric": "nll_change", "reference": "one", "variant": "two"}
    assert set(rows_by_variant(tmp_path)) == {None, "one", "two"}
    assert len(filter_rows(load_results(tmp_path / "runs").rows, pair))
    replace(loaded["two"], started="2000-01-01T00:00:00+00:00").save(loaded["two"].path)
    assert set(rows_by_variant(tmp_path)) == {None, "one"}
    assert filter_rows(load_results(tmp_path / "runs").rows, pair).empty


def test_base_is_scored_once_for_other_tasks_and_seeds(tmp_path, scored, monkeypatch):
    monkeypatch.setattr(benchmarks, "score", perplexity.score)
    build("tiny_llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    command = [*fitting(*tiny(tmp_path), "attention=window", "recipe=none"), f"model.path={tmp_path / 'model'}"]
    succeed(*command, "eval.tasks=[perplexity@16]")
    assert [name for name in scored if "base" in name] == ["base", "perplexity@16, base"]
    succeed(*command, "eval.tasks=[perplexity@16,perplexity@24]", "seed=1")
    succeed(*command, "eval.tasks=[perplexity@24]", "data.hidden_facts=true")
    assert [name for name in scored if "base" in name][2:] == ["perplexity@24, base"]
    succeed(*command, "eval.tasks=[]", "assets=embedded")  # whose benchmarks have other items
    assert [name for name in scored if "base" in name][3:] == ["base"]


def test_compare_setting_that_makes_variants_the_same_run_is_refused(tmp_path):
    windows = {f"w_{size}": [*FIXED, f"attention.window={size}"] for size in (4, 16)}
    command = settings(tmp_path, **windows)
    result = run(*command, "attention.window=8")
    assert result.code == 2 and "w_4, w_16" in result.err and not (tmp_path / "runs").exists()
    assert run(*command, "attention.window=8", "variants=[adhoc/w_4]").code == 0
    assert records(tmp_path)["w_4"].setting("attention", "window") == 8


def test_compare_one_variant_ignores_mistakes_in_others(tmp_path):
    wrong = {"unknown": ["attention=nothing"], "impossible": ["attention.groups=0"]}
    command = write_comparison(tmp_path / "conf", without_attention(tiny(tmp_path)), {"one": FIXED, **wrong})
    succeed(*command, "+variant=adhoc/one")
    assert records(tmp_path)["one"].status == "finished"
