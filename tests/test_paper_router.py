"""The paper's own router in the paper's tables and claims, from small results made by hand."""

import math
from fnmatch import fnmatchcase
from functools import cache

import pandas as pd
import pytest
from builders import compose_config

from focus_exp.reporting.claims import evaluate_claims, keeps
from focus_exp.reporting.frame import BASE, Row, read_yaml, to_frame
from focus_exp.reporting.load import Results, load_results
from focus_exp.reporting.paper_specs import join_key, paper_rows, read_specs
from focus_exp.reporting.paper_tables import paper_tables
from focus_exp.reporting.report import verdict_table
from focus_exp.results.record import Record

PPL = {"source": "rows", "metric": "perplexity", "kind": "hard", "value": 30.5}
SCORE = {"source": "benchmarks", "metric": "score", "kind": "hard", "value": 0.305, "unit": "fraction"}
LONG = {"variant": "paper_k_2", "tokens": 8192, "task": "perplexity@8192", "value": 30.5}


def make_results(experiment, *rows, **facts):
    """Return the results of one run of an experiment with these rows."""
    shared = {
        "run": "one", "experiment": experiment, "seed": 0, "status": "finished", "is_variant": False, "setup": "s",
        "device": "cpu", "device_kind": "cpu", "model": "m", "data": "d", "requested_model": "gpt2_124m",
        "density": 0.5, "sparsity": 0.5, "steps": 4000, "causal": True, "model_params": 1000, "seeds": (0,),
    } | facts  # fmt: skip
    run = {"seed": 0, "experiment": experiment, "device_kind": "cpu", "model": "m", "data": "d", "total_seconds": 60.0}
    runs = pd.DataFrame([{"run": "one", "model_fingerprint": "f", "steps": 4000, **run}]).set_index("run")
    return Results(runs, to_frame(Row(**shared | row) for row in rows))


def shown(table, results):
    """Return the rows of a table of the paper that have runs."""
    frame = next(frame for frame in paper_tables(results) if frame.attrs["spec"].name == table)
    return frame[frame.runs != ""]


MODELS = [f"{row['model']}_paper" for row in paper_rows("table2_scale")]
PLACES = [  # table, experiment, cells of the row, column that shows it
    ("table1_retrofit", "compare", {"variant": "focus_paper"}, "ppl"),
    ("table1_retrofit", "leak", {"num_groups": 4, "primary": True}, "ppl"),
    *(("table_dg", "routing_dim", {"variant": f"paper_{width}"}, "ppl") for width in (16, 32, 128, 768)),
    *(("table2_scale", "model_scale", {"variant": variant}, "ppl_focus") for variant in MODELS),
    ("table3_lora", "compare", {"variant": "focus_paper"}, "ppl"),
    ("table4_alignment", "alignment", {"variant": "paper_k2"}, "ppl"),
    ("table4_alignment", "alignment", {"variant": "paper_k2", "task": "truthfulqa_mc2"}, "truthfulqa_mc2"),
    ("table5_full_training", "full_training", {"variant": "focus_paper"}, "ppl_focus"),
    ("table5_full_training", "from_scratch", {"variant": "focus_paper"}, "ppl_focus"),
    *(
        ("table5_full_training", "domains", {"variant": f"{name}_paper"}, "ppl_focus")
        for name in ("pg19", "wikitext103", "openwebtext", "gpt2_774m", "gpt2_1_5b", "code", "addresses")
    ),
    ("table_long_context", "long_context", LONG, "ppl_focus_k2"),
    ("table7_topk", "leak", {"num_groups": 4, "top_k": 2, "pair_rule": "share"}, "ppl"),
    ("table9_ablation", "ablation", {"variant": "paper", "trainable": "router"}, "ppl_centroid"),
    ("table9_ablation", "ablation", {"variant": "K_2_w_16", "trainable": "router"}, "ppl_centroid"),
    ("table10_token_selection", "compare", {"variant": "focus_paper"}, "ppl"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "experiment", "cells", "column"), PLACES)
def test_paper_table_shows_a_run_of_the_papers_router(table, experiment, cells, column):
    row = {"name": "focus_hard", "causal": False} | cells
    scored = [SCORE | row] if "task" in cells else []
    rows = shown(table, make_results(experiment, PPL | row | {"task": None}, *scored))
    here = rows[rows[f"ours_{column}"].notna()]
    assert len(here) > 0
    assert here[f"ours_{column}"].tolist() == pytest.approx([30.5] * len(here))
    assert set(here.causal) == {False} and set(here.steps) == {"4000"}


def test_paper_table_7_shows_the_time_of_the_papers_router():
    router = {"num_groups": 4, "top_k": 2, "pair_rule": "share"}
    timing = {"source": "speed", "metric": "speedup", "clock": "attention", "assignment": "trained", "tokens": 8192}
    quality = PPL | router | {"causal": False, "name": "focus_hard_k2_share"}
    rows = shown("table7_topk", make_results("speed_quality", quality, timing | router | {"value": 1.5}))
    assert rows[["ours_ppl", "ours_claimed_speedup"]].values.tolist() == [[30.5, 1.5]]


def test_paper_table_3_shows_runs_of_lora_124m():
    row = {**PPL, "kind": "trained", "lora_rank": 16, "name": "lora_r16"}
    assert shown("table3_lora", make_results("lora_124m", row)).method.tolist() == ["lora_r16"]


def test_paper_table_names_what_was_not_run():
    frame = next(f for f in paper_tables(make_results("routing_dim", {**PPL, "variant": "d_32"})) if "d_g" in f)
    assert set(frame[frame.runs == ""].variant) == {
        "d_16", "d_128", "d_768", "paper_16", "paper_32", "paper_128", "paper_768"
    }  # fmt: skip
    assert frame[frame.runs == ""].ours_ppl.isna().all()


@cache
def variants_at_the_papers_budget(experiment):
    config = compose_config(f"+experiment={experiment}", "budget=paper")
    return {path.rpartition("/")[2] for path in config.variants}


def test_paper_tables_rows_are_run_at_the_papers_budget():
    for spec in read_specs():
        for paper in paper_rows(spec.name):
            for place in spec.places(join_key(paper, spec.key)):
                run = set().union(*map(variants_at_the_papers_budget, place.experiments))
                assert set(place.names) <= run | {BASE}, (spec.id, place.names)


def test_claims_variants_are_run_at_the_papers_budget():
    for entry in read_yaml("claims"):
        run = set().union(*map(variants_at_the_papers_budget, entry["experiments"]))
        wanted = entry["select"].get("variant", [])
        for pattern in filter(None, [wanted] if isinstance(wanted, str) else wanted):
            if not pattern.startswith("smollm2"):  # of the embedded assets
                assert any(fnmatchcase(name, pattern) for name in run), (entry["id"], pattern)


def make_change(variant, low, high, **cells):
    change = {"value": (low + high) / 2, "low": low, "high": high, "metric": "nll_change", "source": "rows"}
    return {**change, "unit": "nats", "variant": variant, "reference": "full", "kind": "hard", **cells}


PAPERS, OWN = {"causal": False}, {"causal": True}


def verdict_of(claim, *rows, experiment="full_training"):
    claims = evaluate_claims(make_results(experiment, *rows)).set_index("id")
    return claims.loc[claim]


def test_claim_is_judged_by_the_papers_router_next_to_ours():
    row = verdict_of("T5.1", make_change("focus_paper", 0.1, 0.2, **PAPERS), make_change("focus", -0.04, -0.03, **OWN))
    assert (row.verdict, row.value) == ("not reproduced", pytest.approx(0.15))
    assert (row.own_verdict, row.own_value) == ("reproduced", pytest.approx(-0.035))


def test_claim_without_a_run_of_the_papers_router_has_a_different_router():
    row = verdict_of("T5.1", make_change("focus", 0.1, 0.2, **OWN))
    assert (row.verdict, row.own_verdict) == ("different router", "not reproduced")


@pytest.mark.parametrize(("steps", "reduced"), [(999, True), (1000, False)])
def test_verdict_from_under_a_quarter_of_the_steps_is_a_reduced_budget(steps, reduced):
    claims = evaluate_claims(make_results("full_training", make_change("focus_paper", 0.1, 0.2, steps=steps)))
    shown = verdict_table(claims).set_index("id").verdict["T5.1"]
    assert claims.set_index("id").reduced_budget["T5.1"] == reduced
    assert shown.endswith("reduced budget") == reduced


def test_reduced_budget_of_alignment_and_speed_follow_their_own_steps():
    score = {"metric": "score_change", "task": "hellaswag", "primary": True, "mask_active": True, "unit": "fraction"}
    row = make_change("paper_k2", -0.1, 0.1, **score, steps=500)
    assert not verdict_of("T4.1", row, experiment="alignment").reduced_budget
    timing = {"source": "speed", "metric": "speedup", "clock": "attention", "assignment": "balanced", "groups": 4}
    row = {**timing, "top_k": 1, "tokens": 65536, "value": 5.0, "unit": "x", "steps": 0}
    assert not verdict_of("T7.1", row, experiment="speed").reduced_budget


def make_score(low, high=0.002, model="a", **cells):
    value = {"value": (low + high) / 2, "low": low, "high": high, "dof": math.inf, "unit": "fraction"}
    return Row(**value, model=model, mask_active=True, metric="score_change", **cells)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([make_score(-0.002), make_score(-0.004, model="b")], "reproduced"),
        ([make_score(-0.002), make_score(-0.002)], "inconclusive"),  # one model of two
        ([make_score(-0.002), make_score(-0.03, model="b")], "inconclusive"),
        ([make_score(-0.002), make_score(-0.08, -0.05, model="b")], "not reproduced"),
        ([make_score(-0.002), make_score(-0.08, -0.05, model="b")._replace(mask_active=False)], "inconclusive"),
        ([make_score(-0.08, -0.05)._replace(mask_active=False)], "mask inactive"),
    ],
)
def test_keeps_follows_the_limit_for_every_model(rows, verdict):
    assert keeps(rows, limit=0.01, by="model", count=2).verdict == verdict


ARCHITECTURES = ["MHA", "GQA", "GQA, bias", "MHA, QK norm", "softcap"]


@pytest.mark.parametrize(("count", "low", "verdict"), [(5, -0.002, "reproduced"), (4, -0.002, "inconclusive"),
                                                       (5, -0.05, "not reproduced")])  # fmt: skip
def test_claim_on_architectures_needs_all_five(count, low, verdict):
    cells = {"metric": "score_change", "source": "benchmarks", "task": "piqa", "primary": True, "unit": "fraction"}
    rows = [
        make_change(f"m{number}_paper", low, low + 0.004, model=name, architecture=name, mask_active=True,
                    dof=math.inf, setup=name, **cells)
        for number, name in enumerate(ARCHITECTURES[:count])
    ]  # fmt: skip
    assert verdict_of("T2.4", *rows, experiment="model_scale").verdict == verdict


@pytest.mark.parametrize(("low", "high", "verdict"), [(-0.035, 0.01, "reproduced"), (-0.2, -0.1, "not reproduced")])
def test_claim_on_gsm8k_follows_the_limit(low, high, verdict):
    cells = {"metric": "score_change", "task": "gsm8k_cot", "primary": True, "mask_active": True, "unit": "fraction"}
    row = make_change("mistral_7b_paper", low, high, dof=math.inf, **cells)
    assert verdict_of("T2.5", row, experiment="model_scale").verdict == verdict


def save_run(folder, **config):
    folder.mkdir(parents=True)
    steps = 0 if "adapter" in config else 60
    record = Record(status="finished", experiment="groups", steps=steps, config=config, setup=config["job"])
    record.save(folder / "record.json")


@pytest.mark.parametrize(("job", "same"), [("analyze", True), ("train", False)])
def test_load_results_run_of_an_adapter_has_its_steps(tmp_path, job, same):
    save_run(tmp_path / "focus-seed0-abc", job=job)
    save_run(tmp_path / "focus-seed0-def", job="analyze", adapter="runs/focus-seed0-abc/adapter")
    runs = load_results(tmp_path).runs
    assert runs.steps.tolist() == [60, 60]
    assert (runs.setup.nunique() == 1) == same
