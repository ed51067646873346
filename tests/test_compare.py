"""job=compare: every arm an ordinary run, one table of them all, and nothing lost on the way."""

import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from builders import primary, write_variants
from running import only_run, run, tiny, write_texts
from scipy import stats

from focus_exp.evaluation import perplexity
from focus_exp.evaluation.controls import slug
from focus_exp.jobs import compare as job
from focus_exp.reporting.load import load_results, load_run, select
from focus_exp.reporting.publish import find_inconsistent_run
from focus_exp.results.losses import find_inconsistent, read_losses
from focus_exp.results.record import Record

MEASURED = {"k_1": ["eval.top_k=[1]"], "k_2": ["attention.top_k=2", "eval.top_k=[2]"]}
ARMS = {
    "focus": ["recipe.steps=2"],
    "lora": ["attention=full", "recipe=lora", "recipe.steps=2"],
    "window": ["attention=window", "recipe=none"],
}


def settings(folder, **arms):
    chosen = arms or ARMS
    return [*tiny(folder), "job=compare", *write_variants(folder / "conf", chosen)]


def records(folder):
    """Arm -> its record; the comparison's own is at None."""
    found = {}
    for path in (folder / "runs").rglob("record.json"):
        record = Record.load(path)
        found[record.config["variant"]] = record
    return found


def rows_by_variant(folder, metric="perplexity"):
    """Variant -> its row in the table of the comparison; that of the base is at None."""
    (path,) = (path for path in (folder / "runs").rglob("record.json") if Record.load(path).variants)
    return {row.variant: row for row in select(load_run(path.parent).rows, {"metric": metric, "source": "rows"})}


def test_every_arm_is_a_run_and_a_line_of_the_table(tmp_path):
    result = run(*settings(tmp_path))
    assert result.code == 0, result.err
    found = records(tmp_path)
    assert set(found) == {None, *ARMS}
    comparison = found[None]
    assert [arm.name for arm in comparison.variants] == list(ARMS)
    rows = rows_by_variant(tmp_path)
    assert list(rows) == [None, *ARMS]
    for arm in comparison.variants:
        own = primary(found[arm.name])
        assert (rows[arm.name].value, rows[arm.name].sparsity) == (own.perplexity, own.sparsity)
        assert (arm.settings, arm.steps, arm.tokens_seen) == (
            ARMS[arm.name], found[arm.name].steps, found[arm.name].tokens_seen,
        )  # fmt: skip
    assert {row.kind for row in rows.values()} == {"base", "hard", "trained", "control"}
    assert all(name in result.out for name in ("variant 1 of 3: focus", "variant 3 of 3: window", "ΔPPL [%], focus"))
    fitted_and_balanced = 2 * 32
    assert found["lora"].tokens_seen == found["focus"].tokens_seen - fitted_and_balanced > 0


def test_arms_of_several_processors_are_said_to_be(tmp_path):
    command = settings(tmp_path, window=ARMS["window"], near=[*ARMS["window"], "attention.window=4"])
    assert run(*command).code == 0
    (path,) = tmp_path.glob("runs/adhoc/*/near-seed*/record.json")
    record = Record.load(path)
    record.machine["cpu"] = "another processor"
    record.save(path)
    (compared,) = (path for path in (tmp_path / "runs").rglob("record.json") if Record.load(path).variants)
    assert Record.load(compared).warnings == []
    compared.unlink()
    assert "another processor: near" in run(*command).err


def test_differences_from_the_first_arm_and_from_others_are_those_of_the_losses(tmp_path):
    run(*settings(tmp_path), "references=[lora,gone]")
    comparison = records(tmp_path)[None]
    losses, published = {}, {}
    for arm in comparison.variants:
        (folder,) = tmp_path.glob(f"runs/adhoc/*/{arm.name}-seed*")
        row = primary(Record.load(folder / "record.json"))
        (path,) = [p for p in folder.rglob("*.npz") if p.stem == slug(row.name)]
        with np.load(path) as scores:
            losses[arm.name] = scores["nll"].astype(np.float64)
        (kept,) = folder.rglob("losses.csv")
        published[arm.name] = read_losses(kept)["text"].nll[row.name]
        own = Record.load(kept.with_name("record.json"))
        assert find_inconsistent(own.measurements, read_losses(kept)) == []
        wrong = [replace(m, value=m.value / 2) if m.metric == "perplexity" else m for m in own.measurements]
        assert "perplexity of base" in find_inconsistent(wrong, read_losses(kept))
    (folder,) = (path.parent for path in (tmp_path / "runs").rglob("record.json") if Record.load(path).variants)
    for m in Record.load(folder / "record.json").measurements:
        if m.metric == "nll_change" and m.reference == "focus":
            assert m.value == pytest.approx(np.nanmean(losses[m.variant] - losses["focus"]), abs=1e-7)
            # the losses are enough to compute the interval: sequences of one document, all of the same length
            low, high = stats.ttest_rel(published[m.variant], published["focus"]).confidence_interval()
            assert (m.low, m.high) == pytest.approx((low, high), abs=1e-6)
    assert find_inconsistent_run(folder) == []
    changes = [m for m in Record.load(folder / "record.json").measurements if m.metric == "nll_change"]
    others = {m.variant: m.value for m in changes if m.reference == "lora"}
    expected = {arm: np.nanmean(losses[arm] - losses["lora"]) for arm in ("focus", "window")}
    assert others == {arm: pytest.approx(value, abs=1e-7) for arm, value in expected.items()}
    assert {m.reference for m in changes} == {"focus", "lora"}
    path = folder / "measurements.csv"
    path.write_text(path.read_text().replace(f"{changes[-1].low:.12g}", f"{changes[-1].low - 0.001:.12g}"))
    assert find_inconsistent_run(folder) == [f"{changes[-1].variant} against lora"]
    bases = {record.model["fingerprint"] for arm, record in records(tmp_path).items() if arm}
    assert {arm.base for arm in comparison.variants} == bases and len(bases) == 1


def test_arms_of_several_base_models_are_said_to_be(tmp_path):
    fixed = ["attention=window", "recipe=none", "eval.tasks=[]"]
    arms = {"one": fixed, "large": [*fixed, "model=tiny_gpt2"], "two": [*fixed, "attention.window=4"]}
    result = run(*settings(tmp_path, **arms))
    assert result.code == 0, result.err
    (said,) = records(tmp_path)[None].warnings
    assert "(one, two; large)" in said
    (table,) = tmp_path.glob("runs/adhoc/*/focus-compare-seed*/table.md")
    assert said in table.read_text()


@pytest.mark.slow
def test_arms_are_paired_with_the_first_of_their_own_text_and_model(tmp_path):
    other = write_texts(tmp_path / "others", words=170)
    fixed, random = ["attention=window", "recipe=none"], ["attention=random_groups", "recipe=none"]
    arms = {
        "here": fixed, "there": [*fixed, f"data.files={other}"], "larger": [*fixed, "model=tiny_gpt2"],
        "there_too": [*random, f"data.files={other}"],
    }  # fmt: skip
    assert run(*settings(tmp_path, **arms), "references=[there_too,larger]").code == 0
    rows = rows_by_variant(tmp_path, "nll")
    (folder,) = (path.parent for path in (tmp_path / "runs").rglob("record.json") if Record.load(path).variants)
    changes = [m for m in Record.load(folder / "record.json").measurements if m.metric == "nll_change"]
    found = {(m.variant, m.reference): m.value for m in changes}
    expected = pytest.approx(rows["there_too"].value - rows["there"].value, abs=1e-6)
    assert found[("there_too", "there")] == expected and found[("there", "there_too")] == -found[("there_too", "there")]
    assert len(found) == 2
    table = pd.DataFrame(map(vars, load_results(tmp_path / "runs").complete))
    changes = table[(table.metric == "nll_change") & (table.reference == "there") & table.value.notna()]
    (row,) = changes.itertuples()
    assert (row.variant, row.n_units) == ("there_too", primary(records(tmp_path)["there_too"]).changes["base"].n)


def test_a_failed_arm_stays_with_its_reason_and_is_run_again(tmp_path):
    broken = {**ARMS, "lost": ["data.files=nowhere"]}
    result = run(*settings(tmp_path, **broken))
    assert result.code == 0, result.err
    comparison = records(tmp_path)[None]
    assert [arm.status for arm in comparison.variants] == ["finished"] * 3 + ["failed"]
    assert "nowhere" in comparison.variants[-1].error
    table = pd.DataFrame(map(vars, load_results(tmp_path / "runs").complete))
    assert table[table.error.notna()].variant.tolist() == ["lost"]
    again = run(*settings(tmp_path, **broken))
    assert "variant 1 of 1: lost" in again.out and "already finished: focus, lora, window" in again.out


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
def test_mistake_in_any_variant_is_refused_before_the_first_one_runs(tmp_path, name, settings_of_variant):
    result = run(*settings(tmp_path, focus=[], **{name: settings_of_variant}))
    assert result.code == 2 and result.err.startswith(f"error: variant {name}: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_with_an_adapter_arms_measure_it_and_none_is_trained(tmp_path, scored):
    assert run(*tiny(tmp_path / "router"), "recipe.steps=2", "recipe.warmup_steps=1").code == 0
    adapter = only_run(tmp_path / "router") / "adapter"
    command = [*tiny(tmp_path), "job=compare", f"adapter={adapter}"]
    command += write_variants(tmp_path / "conf", MEASURED)
    result = run(*command)
    assert result.code == 0, result.err
    found = records(tmp_path)
    assert [record.steps for record in found.values()] == [0, 0, 0] and "training" not in result.err
    # beside the scores of the run that trained it: soft gates are the same whatever k
    assert [scored.count(name) for name in ("base", "focus_soft")] == [2, 2]
    soft = [found[name].find("nll", "focus_soft") for name in MEASURED]
    assert soft[0] == soft[1]
    hard = {name: primary(found[name]) for name in MEASURED}
    assert hard["k_1"].sparsity > hard["k_2"].sparsity == 0  # of two groups
    assert [row.top_k for row in rows_by_variant(tmp_path).values()] == [None, 1, 2]
    assert "already finished" in run(*command).out

    another = write_variants(tmp_path / "conf", {**MEASURED, "window": ["attention=window", "recipe=none"]})
    wrong = run(*command, another[-1])
    assert wrong.code == 2 and wrong.err.startswith("error: variant window: attention must be focus")


def test_an_interrupted_comparison_goes_on_with_the_arm_it_was_at(tmp_path, monkeypatch):
    real = job.train

    def stopping(config):
        if config.variant == "lora":
            signal.raise_signal(signal.SIGTERM)
        real(config)

    monkeypatch.setattr(job, "train", stopping)
    assert run(*settings(tmp_path)).code == 128 + signal.SIGTERM
    stopped = records(tmp_path)
    assert set(stopped) == {None, "focus"} and stopped["focus"].status == "finished"
    assert stopped[None].status == "interrupted" and "stopped by SIGTERM" in stopped[None].error
    monkeypatch.setattr(job, "train", real)
    result = run(*settings(tmp_path))
    assert result.code == 0 and "variant 1 of 2: lora" in result.out
    assert all(arm.status == "finished" for arm in records(tmp_path)[None].variants)


@pytest.fixture
def scored(monkeypatch):
    """What was scored, by its name."""
    real, labels = perplexity.score, []

    def counting(model, blocks, batches, precision, label):
        labels.append(label)
        return real(model, blocks, batches, precision, label)

    monkeypatch.setattr(perplexity, "score", counting)
    return labels


@pytest.mark.slow
def test_arms_of_a_sweep_are_those_of_the_comparison(tmp_path, scored):
    swept = run("-m", *settings(tmp_path), "+variant=adhoc/focus,adhoc/lora,adhoc/window", "hydra/launcher=basic")
    assert swept.code == 0, swept.err
    alone = records(tmp_path)
    assert set(alone) == set(ARMS) and scored.count("base") == 1
    gathered = run(*settings(tmp_path))
    assert "already finished: focus, lora, window" in gathered.out
    rows = rows_by_variant(tmp_path)
    assert [rows[name].value for name in ARMS] == [primary(alone[name]).perplexity for name in ARMS]


@pytest.mark.slow
def test_the_base_is_measured_once_for_all_arms_that_share_it(tmp_path, scored):
    # what is asked of the routed model alone is no reason to measure the base again
    wider, longer = [*ARMS["focus"], "eval.top_k=[2]"], [*ARMS["window"], "eval.seq_len=48"]
    other = {**ARMS, "wider": wider, "narrow": [*ARMS["window"], "attention.window=4"], "longer": longer}
    run(*settings(tmp_path, **other))
    assert scored.count("base") == 2
    assert not [m for m in records(tmp_path)[None].measurements if m.variant == "longer"]
    overwritten = run(*settings(tmp_path, **other), "overwrite=true")
    assert "variant 6 of 6: longer" in overwritten.out


def test_an_arm_runs_alone_whatever_is_wrong_with_the_others(tmp_path):
    wrong = {"unknown": ["attention=nothing"], "impossible": ["attention.groups=0"]}
    assert run(*settings(tmp_path, focus=ARMS["focus"], **wrong), "+variant=adhoc/focus").code == 0
