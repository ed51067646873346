"""Comparators, aggregation over seeds, and the table of measurements that they read."""

import math

import pytest

from focus_exp.reporting.claims import Claim, at_least, below, collapses, drops
from focus_exp.reporting.frame import (
    Row,
    aggregate_seeds,
    filter_rows,
    is_worse,
    read_yaml,
    required_sample,
    to_frame,
    to_rows,
)
from focus_exp.results.intervals import Estimate, combine_seeds, required_size, student


def make_row(**cells):
    blank = {"seeds": (0,), "members": []}
    return Row(**blank | {"device_kind": "cpu", "metric": "nll_change", "unit": "nats"} | cells)


def make_change(low, high, **cells):
    return make_row(value=(low + high) / 2, low=low, high=high, **cells)


@pytest.mark.parametrize(
    ("low", "high", "size", "cells", "verdict"),
    [
        (-0.2, -0.1, None, {}, "reproduced"),
        (-0.2, -0.1, -0.15, {}, "reproduced"),
        (-0.4, -0.1, -0.15, {}, "same direction"),  # so wide that it contains twice the effect
        (-0.2, -0.1, -0.05, {}, "same direction"),
        (-0.1, 0.1, -0.15, {}, "inconclusive"),
        (0.1, 0.2, -0.15, {}, "not reproduced"),
        (None, None, None, {}, "inconclusive"),
        # a non-causal side has an advantage: it can lose, but cannot support a claim
        (-0.2, -0.1, None, {"causal": False}, "non-causal"),
        (0.1, 0.2, None, {"causal": False}, "not reproduced"),
        (0.1, 0.2, None, {"reference_causal": False}, "non-causal"),
        (-0.2, -0.1, None, {"reference_causal": False}, "reproduced"),
        (-0.2, -0.1, None, {"causal": False, "reference_causal": False}, "reproduced"),
        (0.1, 0.2, None, {"causal": False, "reference_causal": False}, "not reproduced"),
    ],
)
def test_below_follows_the_interval(low, high, size, cells, verdict):
    row = make_row(value=-0.1, low=low, high=high, **cells)
    ratio = None if size is None else [math.exp(size), 1]
    assert below([row], paper_ratio=ratio).verdict == verdict


def test_below_inactive_mask_is_left_out():
    idle = make_change(-0.2, -0.1, mask_active=False)
    active = make_change(-0.1, 0.1, mask_active=True)
    assert below([idle]).verdict == "mask inactive"
    judgement = below([idle, active])
    assert judgement.verdict == "inconclusive"
    assert judgement.row is active


def test_below_any_refuted_row_refutes():
    judgement = below([make_change(-0.2, -0.1), make_change(0.1, 0.2)])
    assert judgement.verdict == "not reproduced"


def make_timing(tokens, value, device_kind="NVIDIA H100"):
    return make_row(metric="speedup", unit="x", tokens=tokens, value=value, device_kind=device_kind)


LIMIT = {4096: 2.0, 16384: 3.0}


@pytest.mark.parametrize(
    ("timings", "verdict"),
    [
        ({4096: 2.0, 16384: 2.9}, "reproduced"),
        ({4096: 1.5, 16384: 3.0}, "same direction"),
        ({4096: 0.5, 16384: 3.0}, "not reproduced"),
        ({4096: 2.0}, "inconclusive"),
    ],
)
def test_at_least_compares_each_length(timings, verdict):
    rows = [make_timing(tokens, value) for tokens, value in timings.items()]
    assert at_least(rows, LIMIT, gpu=True).verdict == verdict


def test_at_least_prefers_the_papers_device():
    gpu = [make_timing(tokens, 4.0) for tokens in LIMIT]
    cpu = [make_timing(tokens, 0.5, "cpu") for tokens in LIMIT]
    assert at_least(gpu + cpu, LIMIT, gpu=True).verdict == "reproduced"
    assert at_least([make_timing(tokens, 4.0, "cpu") for tokens in LIMIT], LIMIT, gpu=True).verdict == "same direction"


def test_at_least_disagreeing_runs_are_inconclusive():
    rows = [make_timing(4096, 2.5), make_timing(4096, 1.5)]
    assert at_least(rows, {4096: 2.0}).verdict == "inconclusive"


@pytest.mark.parametrize(("value", "verdict"), [(0.9, "reproduced"), (0.99, "same direction"), (0.5, "not reproduced")])
def test_at_least_fraction_has_tolerance(value, verdict):
    row = make_row(metric="confidence", unit="fraction", value=value)
    assert at_least([row], 0.89, most=0.94).verdict == verdict


def make_router(largest, empty, step=600, seeds=(0,), spread=None, setup="a"):
    def cells(value):
        return {} if spread is None else {"low": value - spread, "high": value + spread}

    common = {"phase": "all", "step": step, "num_groups": 8, "seeds": seeds, "setup": setup, "variant": "v"}
    return [
        make_row(metric="dominance_most", value=largest, **common, **cells(largest)),
        make_row(metric="dead_groups_most", value=empty, **common, **cells(empty)),
    ]


COLLAPSE = {"limit": 0.9, "dead": 0.75, "steps": 600}
BALANCE = {"limit": 0.5, "dead": 1, "steps": 600, "claimed": False}


@pytest.mark.parametrize(
    ("largest", "empty", "collapse", "balance"),
    [
        (0.994, 7.0, "reproduced", "not reproduced"),
        (0.6, 3.0, "not reproduced", "not reproduced"),
        (0.16, 0.0, "not reproduced", "reproduced"),
        (0.45, 6.5, "reproduced", "reproduced"),
    ],
)
def test_collapses_follows_largest_and_empty_groups(largest, empty, collapse, balance):
    rows = make_router(largest, empty)
    assert collapses(rows, **COLLAPSE).verdict == collapse
    assert collapses(rows, **BALANCE).verdict == balance


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (make_router(0.2, 0.0, step=100), "inconclusive"),  # trained too short
        (make_router(0.99, 7.0, step=100), "reproduced"),
        (make_router(0.99, 7.0) + make_router(0.2, 0.0, setup="b"), "inconclusive"),  # setups must agree
        # over seeds the interval decides
        (make_router(0.6, 0.1, seeds=(0, 1, 2), spread=0.19), "not reproduced"),
        (make_router(0.6, 0.1, seeds=(0, 1, 2), spread=0.4), "inconclusive"),
    ],
)
def test_collapses_considers_steps_setups_and_seeds(rows, verdict):
    assert collapses(rows, **COLLAPSE).verdict == verdict


def make_score(low, high, active=True, unit="fraction"):
    return make_change(low, high, mask_active=active, unit=unit, metric="score_change", dof=math.inf)


def test_drops_unclaimed_without_active_mask():
    assert drops([make_score(0.0, 0.0, active=False)], claimed=False).verdict == "mask inactive"
    assert drops([make_score(-0.1, 0.1)], claimed=False).verdict == "inconclusive"
    assert drops([make_score(-0.2, -0.1)], claimed=False).verdict == "not reproduced"


def test_drops_is_corrected_for_multiplicity():
    barely = make_score(-0.2, -0.001)
    assert drops([barely], claimed=True).verdict == "reproduced"
    assert drops([barely, make_score(-0.1, 0.1)], claimed=True).verdict == "inconclusive"


def test_is_worse_of_a_loss_is_a_rise():
    assert is_worse(make_score(0.1, 0.2, unit="nats"))
    assert not is_worse(make_score(0.1, 0.2))
    assert not is_worse(make_row(value=-0.1))


def make_claim(**changes):
    fields = {"select": {"variant": "focus", "reference": "lora"}, "compare": below}
    return Claim(id="X", claim="c", paper="p", experiments=["compare"], **{**fields, **changes})


def test_judge_without_rows_is_not_run_or_out_of_scope():
    assert make_claim().judge([]).verdict == "not run"
    assert make_claim(needs="a GPU").judge([]).verdict == "out of scope"


def test_judge_picks_the_longest():
    rows = [make_change(-0.2, -0.1, tokens=1024), make_change(0.1, 0.2, tokens=4096)]
    assert make_claim(pick="tokens").judge(rows).verdict == "not reproduced"


def make_seed(seed, value, stderr=0.01, **cells):
    return make_row(seed=seed, value=value, stderr=stderr, dof=5.0, n_units=6, **cells)


def test_aggregate_seeds_uses_over_seeds():
    rows = [make_seed(seed, value) for seed, value in enumerate((0.1, 0.2, 0.3))]
    (total,) = aggregate_seeds(to_frame(rows))
    expected = combine_seeds([Estimate(row.value, row.stderr, row.dof) for row in rows])
    assert (total.value, total.low, total.high) == (expected.value, *expected.bounds)
    assert total.seeds == (0, 1, 2)
    assert total.seed_deviation == pytest.approx(0.1)
    assert total.deviation == pytest.approx(0.01 * math.sqrt(6))


def test_aggregate_seeds_latest_run_of_a_seed_counts():
    (total,) = aggregate_seeds(to_frame([make_seed(0, 0.1), make_seed(0, 0.5)]))
    assert total.value == 0.5
    assert total.low == pytest.approx(0.5 - student(5.0) * 0.01)


def test_aggregate_seeds_keeps_kernels_of_timings_apart():
    rows = [make_timing(65_536, 3.0)._replace(clock="attention", seed=0, path=path) for path in ("flash", "triton")]
    assert sorted(row.path for row in aggregate_seeds(to_frame(rows))) == ["flash", "triton"]


@pytest.mark.parametrize(
    ("path", "value", "verdict"),
    [("flash", 2.0, "reproduced"), ("flash", 0.5, "not reproduced"), ("triton", 2.0, "not run")],
)
def test_claim_of_no_custom_kernels_is_about_flash_alone(path, value, verdict):
    (claim,) = (Claim.read(entry) for entry in read_yaml("claims") if entry["id"] == "T6.5")
    cells = {"clock": "attention", "assignment": "balanced", "groups": 8, "top_k": 1, "path": path}
    rows = filter_rows(to_frame([make_timing(65_536, value)._replace(**cells)]), claim.select)
    assert claim.judge(to_rows(rows)).verdict == verdict


@pytest.mark.parametrize("column", ["setup", "variant", "reference", "top_k", "task", "phase"])
def test_aggregate_seeds_keeps_setups_apart(column):
    rows = [make_seed(0, 0.1, **{column: "a"}), make_seed(1, 0.1, **{column: "b"})]
    assert len(aggregate_seeds(to_frame(rows))) == 2


def test_required_sample_grows_with_comparisons():
    row = make_row(deviation=0.1, seed_deviation=0.05, n_units=6, seeds=(0, 1, 2))
    one, several = required_sample(row, 0.02), required_sample(row, 0.02, comparisons=4)
    assert one["required_units"] == required_size(0.1, 0.02)
    assert one["required_seeds"] == required_size(0.05, 0.02)
    assert several["required_units"] > one["required_units"]


def test_select_takes_lists_patterns_and_limits(published):
    rows = published.rows
    assert {*filter_rows(rows, {"variant": "k_2*"}).variant} == {"k_2", "k_2_share"}
    assert {*filter_rows(rows, {"top_k": [2, 3], "num_groups": 4}).top_k} == {2, 3}
    assert filter_rows(rows, {"variant": "none"}).empty
    assert 0 < filter_rows(rows, {"tokens": {"most": 2048}}).tokens.max() <= 2048  # a missing cell does not compare


def test_frame_refuses_a_wrong_column(published):
    with pytest.raises(KeyError):
        filter_rows(published.rows, {"verison": None})
    with pytest.raises(AttributeError):
        make_row().verison  # noqa: B018  # that it raises is what is tested
    with pytest.raises(TypeError):
        Row(verison=1)
