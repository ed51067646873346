"""Measurements: every number of every record, differences both ways round; claims and traps are entries over them."""

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_compare import compared, comparison_of, row

from focus_exp import UserError
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.intervals import NORMAL, Estimate, over_seeds
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Difference, ProbeRow, Row
from focus_exp.reporting import claims as ledger
from focus_exp.reporting import specs, trust
from focus_exp.reporting.comparators import at_least, below, stays_even, takes_over
from focus_exp.reporting.formats import (
    NOT_ENGAGED,
    NOT_HERE,
    NOT_REPRODUCED,
    NOT_RUN,
    OTHER_METHOD,
    REPRODUCED,
    SAME_DIRECTION,
    UNDECIDED,
)
from focus_exp.reporting.gather import Runs, gather, setup
from focus_exp.reporting.measured import Line, lines_of
from focus_exp.reporting.measures import COLUMNS, measurements
from focus_exp.reporting.selection import select
from focus_exp.reporting.subjects import SOFT_GATE
from focus_exp.reporting.together import together
from focus_exp.reporting.whole_report import write_report_of

RECORDS = Path(__file__).parent.parent / "runs" / "records"
CLAIM = {
    "table": "T1", "says": "Focus is better than $arm", "paper": "{{ row.ppl }}", "each": [{"arm": "lora"}],
    "rows": {"row": ["table1_retrofit", "focus"]}, "experiments": ["compare"],
    "select": {"measure": "delta", "against": "$arm"}, "where": "arm == first", "test": {"below": {"limit": 0}},
    "ours": "{{ line.arm }}: {{ line.change }}", "why": "k={{ line.top_k }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    return gather(RECORDS)


@pytest.fixture(scope="module")
def table(runs):
    return measurements(runs)


@pytest.fixture
def entries(monkeypatch):
    """Other entries in place of claims.yaml."""

    def write(*found):
        monkeypatch.setattr(specs, "read_yaml", lambda name: list(found))
        ledger.claims.cache_clear()

    yield write
    ledger.claims.cache_clear()


def line_of(**cells):
    return Line(**dict.fromkeys(COLUMNS) | dict.fromkeys(("deviation", "deviation_of_seeds")) | {"seeds": [0]} | cells)


def runs_of(*records):
    return Runs([(Path(str(number)), record) for number, record in enumerate(records)])


def arms(delta=-0.1, **changes):
    found = comparison_of(row("focus", kind="hard", top_k=1), row("lora", kind="trained", **compared(-delta)))
    return replace(found, experiment="compare", **changes)


def test_a_difference_between_arms_stands_in_both_directions(table):
    between = select(table, {"of": "rows", "measure": "delta"}, "against == first or arm == first")
    between = between[between.against != "base"]
    key = ["run", "arm", "against"]
    turned = between.rename(columns={"arm": "against", "against": "arm", "low": "high", "high": "low"})
    both = between.merge(turned, on=key, suffixes=("", "_turned"))
    assert len(both) == len(between) == between[key].drop_duplicates().shape[0] > 180
    for column in ("value", "low", "high"):
        assert (both[column] == -both[f"{column}_turned"]).all()
    assert (both.causal == both.against_causal_turned).all() and (both.against_causal == both.causal_turned).all()


def test_a_delta_is_the_logarithm_of_its_two_levels(table):
    deltas = select(table, {"of": ["rows", "phases"], "measure": "delta"}, "level.notna()").astype({"level": float})
    assert len(deltas) > 1000
    assert (deltas.level / deltas.level_against).map(math.log).sub(deltas.value).abs().max() < 1e-9


def test_what_failed_is_a_line_without_a_value():
    failed = Row(name="LoRA", kind="trained", method="full", causal=True, arm="lora", error="no memory")
    found = comparison_of(row("focus", kind="hard"), failed)
    (line,) = select(measurements(runs_of(found)), {"of": "rows", "arm": "lora"}).to_dict("records")
    assert line["error"] == "no memory" and pd.isna(line["value"])
    assert list(measurements(Runs()).columns) == list(COLUMNS)


def test_an_entry_is_a_claim(entries):
    entries(CLAIM, {"table": "T2", "says": "more", "paper": "7.6", "needs": "needs a GPU"})
    records = [arms(delta, seed=seed) for seed, delta in enumerate((-0.20, -0.21, -0.22))]
    ((claim, verdict), (_, needs)) = ledger.judged(records)
    assert (claim.says, claim.paper, verdict.word) == ("Focus is better than lora", "36.2", REPRODUCED)
    assert verdict.ours.startswith("focus: -18.94 % [") and verdict.why == "k=1"
    low, high = over_seeds([Estimate(delta, 0.01 / NORMAL, math.inf) for delta in (-0.20, -0.21, -0.22)]).bounds
    assert verdict.numbers == pytest.approx({"value": -0.21, "low": low, "high": high, "unit": "nats"})
    assert (needs.word, needs.why) == (NOT_HERE, "needs a GPU")
    assert ledger.judged([])[0][1].why == "python -m focus_exp +experiment=compare"


def test_under_two_set_ups_the_sentence_is_of_the_one_that_the_verdict_hangs_on(entries):
    entries(CLAIM)
    better, open_ = arms(-0.2, seed=0), arms(-0.001, seed=1)
    open_ = replace(open_, arms=[replace(arm, tokens_seen=123) for arm in open_.arms])
    runs = Runs([(Path(str(number)), record) for number, record in enumerate([better, open_])])
    ((claim, verdict),) = ledger.judged_runs(runs)
    assert verdict.word == UNDECIDED and verdict.numbers["value"] == pytest.approx(-0.001)
    (row,) = ledger.claim_table([(claim, verdict)], runs).values
    assert row["seeds"] == "1" and len(verdict.records) == 2
    assert verdict.ours.startswith("focus: -0.10 % [")


def test_what_is_measured_otherwise_than_the_papers_is_another_method(entries):
    entries(CLAIM | {"like": {"top_k": 2}}, CLAIM | {"like": {"top_k": 1}}, CLAIM | {"other": "a router of ours"})
    unlike, alike, other = (verdict for _, verdict in ledger.judged([arms(seed=0)]))
    assert (unlike.word, alike.word, other.word) == (OTHER_METHOD, REPRODUCED, OTHER_METHOD)
    assert unlike.why == "nothing here has top_k 2; under it: reproduced; k=1" and "a router of ours" in other.why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wher": "arm"}, "0: wher"),
        ({"pick": "best"}, "pick"),
        ({"select": {"arms": "focus"}}, "no column arms"),
        ({"where": "arm == frist"}, "'frist' is not defined"),
        ({"where": "arm =="}, "where"),
        ({"test": {"beneath": {}}}, "there are below, at_least"),
        ({"test": {"below": {"limt": 0}}}, "'limit'"),
        ({"test": {}}, "one test"),
        ({"rows": {"row": ["table1_retrofit", "fokus"]}}, "no row fokus"),
        ({"paper": "{{ rwo.ppl }}"}, "'rwo' is undefined"),
        ({"ours": "{{ line.arm"}, "no template"),
    ],
    ids=str,
)
def test_a_wrong_entry_is_one_message(entries, changes, said):
    entries(CLAIM | changes)
    with pytest.raises(UserError, match=said) as wrong:
        ledger.claims()
    assert str(wrong.value).startswith("claims.yaml: ")


def test_every_text_of_every_entry_is_rendered_on_the_committed_records(runs):
    for claim, verdict in ledger.judged_runs(runs):
        assert verdict.word != NOT_RUN, claim.says
        assert verdict.why and "{" not in verdict.ours + verdict.why + claim.says + claim.paper
    shown = trust.traps_table(runs)
    assert {line[0] for line in shown.rows} == {trap.trap for trap in specs.read_specs("traps", list[trust.Trap])}
    assert NOT_RUN not in {line[1] for line in shown.rows}


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0.001, 0.5)), min_size=1, max_size=4), st.floats(-0.5, 0.5))
def test_below_is_what_the_intervals_say(found, limit):
    facts = {"arm": "focus", "of": "rows", "units": 6, "causal": True, "against": "lora", "against_causal": True}
    lines = [line_of(value=v, low=v - half, high=v + half, **facts) for v, half in found]
    said = below(lines, limit).word
    assert (said == REPRODUCED) == all(line.high < limit for line in lines)
    assert (said == NOT_REPRODUCED) == any(line.low > limit for line in lines)
    if said == UNDECIDED:
        assert below(lines, limit).needs.startswith("3 seeds for ")
    spoiled = line_of(**vars(lines[0]) | {"low": None, "high": None})
    assert below([*lines, spoiled], limit).word == (said if said == NOT_REPRODUCED else UNDECIDED)


@pytest.mark.parametrize(
    ("value", "reader", "word"),
    [(0.2, "focus", NOT_REPRODUCED), (-0.2, "focus", NOT_HERE), (0.2, "lora", NOT_HERE), (-0.2, "lora", REPRODUCED)],
)
def test_who_reads_the_future_can_only_lose(value, reader, word):
    facts = {"arm": "focus", "against": "lora", "causal": reader != "focus", "against_causal": reader != "lora"}
    line = line_of(value=value, low=value - 0.1, high=value + 0.1, **facts)
    assert below([line], 0).word == word


def seed_of(seed, **cells):
    facts = dict.fromkeys(COLUMNS) | {"of": "benchmarks", "status": "finished", "value": 0.1, "unit": "share"}
    return Line(**facts | {"seed": seed, "run": f"run {seed}", "name": "hard", "freedom": 23.0} | cells)


@pytest.mark.parametrize("order", [1, -1])
def test_what_seeds_say_together_does_not_hang_on_which_came_first(order):
    few = {"engaged": False, "pairs_removed": 0.04, "units": 24, "stderr": 0.1}
    many = {"engaged": True, "pairs_removed": 0.5, "units": 2400, "stderr": 0.01}
    (line,) = together([seed_of(seed, **cells) for seed, cells in enumerate((few, many)[::order])])
    assert line.engaged and line.deviation == pytest.approx(0.1 * 24**0.5)


def test_a_finished_run_of_a_seed_stands_before_a_later_one_that_was_interrupted():
    finished, part = seed_of(0, value=0.3), seed_of(0, value=0.1, status="interrupted")
    assert [together(lines)[0].value for lines in ([finished, part], [part])] == [0.3, 0.1]
    assert together([finished, seed_of(0, value=0.2)])[0].value == 0.2


def test_seeds_of_two_kinds_of_device_are_not_taken_together():
    cpu, other, gpu = (
        Record(status="finished", experiment="retrofit_124m", seed=seed, device=device)
        for seed, device in enumerate(("cpu, 2 threads, bfloat16", "cpu, 1 threads, bfloat16", "NVIDIA H200, bfloat16"))
    )
    assert setup(cpu) == setup(other) != setup(gpu)


@pytest.mark.parametrize("value", [0.2, -0.2])
def test_between_two_who_read_the_future_nothing_is_decided(value):
    facts = {"arm": "focus", "against": "lora", "causal": False, "against_causal": False}
    line = line_of(value=value, low=value - 0.1, high=value + 0.1, **facts)
    found = below([line], 0)
    assert found.word == NOT_HERE and "focus and lora read the future" in found.why


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.3, -0.1, REPRODUCED),
        (-0.5, -0.1, SAME_DIRECTION),  # the paper's number, and twice that number
        (-0.19, -0.1, SAME_DIRECTION),
        (-0.5, -0.21, SAME_DIRECTION),
        (-0.3, 0.1, UNDECIDED),
    ],
)
def test_an_interval_too_wide_to_tell_the_papers_size_from_twice_it_does_not_reproduce_it(low, high, word):
    line = line_of(value=(low + high) / 2, low=low, high=high, arm="focus", causal=True, against="base")
    assert below([line], 0, size=-0.2).word == word


@pytest.mark.parametrize(
    ("largest", "dead", "takes", "even"),
    [
        ((0.95, None, None), (0.0, None, None), REPRODUCED, NOT_REPRODUCED),
        ((0.4, None, None), (0.0, None, None), NOT_REPRODUCED, REPRODUCED),
        ((0.91, 0.65, 1.17), (0.0, 0.0, 0.0), UNDECIDED, NOT_REPRODUCED),
        ((0.95, 0.92, 0.98), (0.0, 0.0, 0.0), REPRODUCED, NOT_REPRODUCED),
        ((0.2, 0.15, 0.25), (6.5, 6.2, 6.8), REPRODUCED, UNDECIDED),
        ((0.2, 0.15, 0.25), (6.5, 5.0, 8.0), UNDECIDED, UNDECIDED),
        ((0.2, 0.15, 0.25), (0.9, -0.5, 2.9), NOT_REPRODUCED, UNDECIDED),
        ((0.2, 0.15, 0.25), (0.0, 0.0, 0.0), NOT_REPRODUCED, REPRODUCED),
    ],
)
def test_groups_die_or_live_by_whole_intervals(largest, dead, takes, even):
    facts = {"setup": "", "arm": "softmax", "phase": "all", "step": 600, "K": 8, "seeds": [0, 1, 2]}
    lines = [
        line_of(measure=measure, **dict(zip(("value", "low", "high"), numbers, strict=True)), **facts)
        for measure, numbers in (("dominance_most", largest), ("dead_groups_most", dead))
    ]
    assert takes_over(lines, share=0.9, dead=0.75, steps=600).word == takes
    assert stays_even(lines, share=0.5, steps=600, size=1.0, margin=0.05).word == even


@pytest.mark.parametrize(("largest", "word"), [(0.15, REPRODUCED), (0.4, SAME_DIRECTION), (0.6, NOT_REPRODUCED)])
def test_groups_less_even_than_the_papers_are_the_same_direction(largest, word):
    facts = {"setup": "", "arm": "sinkhorn", "phase": "all", "step": 600, "K": 8}
    most = {"dominance_most": largest, "dead_groups_most": 0.0}
    lines = [line_of(measure=measure, value=value, **facts) for measure, value in most.items()]
    assert stays_even(lines, share=0.5, steps=600, size=0.16, margin=0.05).word == word


def probes_of(arm, phase, *shares):
    facts = dict.fromkeys(("dead_groups", "dead_groups_worst", "entropy"), 0.0) | {"confidence": 0.5}
    return [
        ProbeRow(phase=phase, step=300 * at, dominance=share, dominance_worst=share, arm=arm, **facts)
        for at, share in enumerate(shares)
    ]


def collapses(probes, said="softmax with a balance loss collapses", trains="all", **arms):
    record = Record(
        status="finished", experiment="stability", probes=probes, seed=0,
        arms=[Arm(name=name, settings=[], error=error) for name, error in arms.items()],
        config={"attention": {"groups": 8}, "regime": {"phases": {"one": {"train": trains}, "two": {"train": trains}}}},
    )  # fmt: skip
    (found,) = [verdict for claim, verdict in ledger.judged([record]) if said in claim.says]
    return found


@pytest.mark.parametrize(
    ("shares", "word"),
    [((0.2, 0.2, 0.2), NOT_REPRODUCED), ((0.2, 0.99, 0.2), REPRODUCED), ((0.99, 0.2, 0.2), NOT_REPRODUCED)],
)
def test_groups_that_a_router_lost_on_the_way_were_lost(shares, word):
    """Though it ends evenly; what it began with is of the phase before."""
    found = collapses(probes_of("balance", "one", *shares), balance=None)
    assert found.word == word and f"on the way at most {100 * max(shares[1:]):.1f} %" in found.ours
    found = collapses(probes_of("sinkhorn", "one", *shares), said="under Sinkhorn no group", sinkhorn=None)
    assert found.word == {REPRODUCED: NOT_REPRODUCED, NOT_REPRODUCED: REPRODUCED}[word]


def test_what_happens_in_one_of_two_phases_happens():
    probes = probes_of("balance", "one", 0.2, 0.99, 0.99) + probes_of("balance", "two", 0.2, 0.2, 0.2)
    assert collapses(probes, balance=None).word == REPRODUCED


def test_what_failed_is_told_of_and_shows_nothing():
    probes = probes_of("balance", "one", 0.2, 0.2, 0.2)
    found = collapses(probes, balance=None, balance_rate_x10="loss is not finite", ema="another arm")
    assert found.word == UNDECIDED and found.needs == "balance_rate_x10 to its end"
    assert "balance_rate_x10, seed 0, failed: loss is not finite" in found.why and "another arm" not in found.why


def compared_arms(*names, seed=0, failed=None, **arms):
    """A comparison whose first arm is a hundredth of a nat better than every other one, and at last words.

    failed: of an arm the error of its row; arms: what else there is of one.
    """
    rows = [row(name, kind="hard", error=(failed or {}).get(name)) for name in names]
    known = {"task": "last_word@500", "metric": "perplexity", "n": 6, "pairs_removed": 0.5, "freedom": 5.0}
    bounds = {"difference": -0.01, "difference_low": -0.02, "difference_high": 0.0}
    scores = [BenchmarkRow(attention=name, kind="hard", method="focus", value=9.0, **known, **bounds) for name in names]
    found = comparison_of(*rows, benchmarks=scores)
    broken = {*(failed or {}), *(name for name, arm in arms.items() if "error" in arm)}
    differences = [
        Difference(arm=name, value=-0.01, low=-0.02, high=-0.005) for name in names[1:] if not broken & {name, names[0]}
    ]
    changed = [replace(arm, **arms.get(arm.name, {})) for arm in found.arms]
    return replace(
        found, experiment="compare", arms=changed, differences=differences, seed=seed, started=str(seed)
    )  # fmt: skip


def verdict_on(says, *records):
    (found,) = [verdict for claim, verdict in ledger.judged(list(records)) if says in claim.says]
    return found


def test_without_focus_nothing_is_said_of_it():
    """By `~arms.focus`: what comes first then is another method."""
    record = compared_arms("lora", "magicpig", "longformer")
    for says in ("a score on which the mask acts", "than magicpig with 32 tokens", "stay as they are"):
        assert verdict_on(says, record).word == NOT_RUN
    assert verdict_on("a score on which the mask acts", compared_arms("focus", "magicpig")).word != NOT_RUN


def test_an_arm_that_failed_is_told_of_on_either_side():
    says, error = "than magicpig with 32 tokens", "CUDA out of memory"
    whole = compared_arms("magicpig", "focus")
    assert verdict_on(says, whole).word == SAME_DIRECTION
    for name in ("focus", "magicpig"):
        broken = compared_arms("magicpig", "focus", seed=1, **{name: {"error": error, "status": "failed"}})
        found = verdict_on(says, whole, broken)
        assert found.word == SAME_DIRECTION and f"{name}, seed 1, failed: {error}" in found.why
        alone = verdict_on(says, broken)
        assert alone.word == UNDECIDED and alone.needs == f"{name} to its end" and error in alone.why
        again = replace(whole, seed=1, started="2")
        assert error not in verdict_on(says, whole, broken, again).why
        row_failed = compared_arms("magicpig", "focus", seed=1, failed={name: error})
        assert f"{name}, seed 1, failed: {error}" in verdict_on(says, whole, row_failed).why


def test_a_score_that_failed_is_told_of_where_it_is_asked_for():
    record = compared_arms("focus", "magicpig")
    lost = [replace(record.benchmarks[0], value=None, difference=None, error="no memory"), *record.benchmarks[1:]]
    broken = replace(record, benchmarks=lost, seed=1, started="1")
    found = verdict_on("a score on which the mask acts", record, broken)
    assert "focus, last_word@500, seed 1, failed: no memory" in found.why
    assert "no memory" not in verdict_on("than magicpig with 32 tokens", record, broken).why


def test_an_arm_that_decides_nothing_is_missed_by_nobody():
    says = "two of four groups a query cost no model more"
    record = compared_arms("small", "paper", "code")
    record.config["attention"]["groups"] = 4
    rows = [
        replace(one, top_k=2, pair_rule="share", delta_nll=0.01, delta_low=0.0, delta_high=0.02) for one in record.rows
    ]
    rows[-1] = replace(rows[-1], nll=None, perplexity=None, error="no memory")
    found = verdict_on(says, replace(record, experiment="model_scale", rows=rows))
    assert found.word == OTHER_METHOD and "code, seed 0, failed: no memory" in found.why
    lost = {"entropy_balance": "no memory"}
    alone = collapses(probes_of("balance", "one", 0.2, 0.2, 0.2), balance=None)
    told = collapses(probes_of("balance", "one", 0.2, 0.2, 0.2), balance=None, **lost)
    assert told.word == alone.word == NOT_REPRODUCED and "entropy_balance, seed 0, failed: no memory" in told.why


def test_what_is_refuted_stays_so_whatever_failed():
    rows = [
        row("a_full", kind="trained"),
        row("a_focus", kind="hard"),
        row("b_full", kind="trained", error="no memory"),
    ]
    record = comparison_of(*rows)
    worse = [Difference(arm="a_focus", value=0.3, low=0.2, high=0.4, against="a_full")]
    record = replace(record, experiment="domains", differences=worse, seed=0)
    found = verdict_on("on other texts too", record)
    assert found.word == NOT_REPRODUCED and "b_full, seed 0, failed: no memory" in found.why


def test_seeds_of_which_most_are_idle_are_idle():
    shares = (0.06, 0.01, 0.012)
    (line,) = together([seed_of(n, engaged=share >= 0.05, pairs_removed=share) for n, share in enumerate(shares)])
    assert line.engaged is False


def test_seeds_of_an_arm_are_one_set_up_whatever_came_first():
    facts = {"method": "focus", "top_k": 1, "delta_nll": 0.1, "delta_low": 0.05, "delta_high": 0.15}
    records = []
    for seed, names in enumerate((("other", "focus"), ("focus",))):
        rows = [row(name, kind="hard", **facts if name == "focus" else {}) for name in names]
        records.append(replace(comparison_of(*rows), seed=seed, started=str(seed), experiment="stability"))
    lines = lines_of(select(measurements(runs_of(*records)), {"arm": "focus", "measure": "delta", "against": "base"}))
    assert [line.seeds for line in together(lines)] == [[0, 1]]


def test_what_stands_beside_a_claim_is_of_its_own_set_up():
    records = []
    for model in ("ours", "another"):
        found = compared_arms("full_finetuning", "longformer", "focus", seed=0)
        against = Difference(arm="focus", value=0.1, low=0.05, high=0.15, against="longformer")
        known = {"model": {"name": model}, "started": model, "differences": [*found.differences, against]}
        records.append(replace(found, **known))
    records[1].differences.pop()
    found = verdict_on("than longformer with all weights", *records)
    assert found.why.count("focus -1.00 %") == 1


def test_the_papers_own_gpu_is_judged_before_another():
    def timed(device, value):
        return line_of(measure="ratio", tokens=65_536, value=value, device=device)

    found = at_least(
        [timed("NVIDIA H200, bfloat16", 1.0), timed("NVIDIA H100 80GB HBM3, bfloat16", 5.0)], {65_536: 4.7}, gpu=True
    )
    assert found.word == REPRODUCED and len(found.lines) == 1


def test_the_gap_to_soft_gates_has_the_interval_of_its_losses(runs, table):
    gaps = select(table, {"against": SOFT_GATE, "of": "rows"}, "value.notna()")
    assert gaps.low.notna().mean() > 0.9
    line = next(line for line in lines_of(gaps) if line.low is not None and not line.is_arm)
    losses, record = runs.losses(runs.named[line.run]), runs.named[line.run]
    soft = next(one.name for one in record.rows if one.kind == "soft")
    found = losses.difference(line.name, losses, soft)
    assert (line.value, line.low, line.high) == pytest.approx((found.value, *found.bounds), abs=1e-5)


def test_what_failed_and_left_probes_is_told_of():
    probes = probes_of("balance", "one", 0.2, 0.2, 0.2)
    assert "balance, seed 0, failed: loss is not finite" in collapses(probes, balance="loss is not finite").why


def test_a_reference_that_was_trained_otherwise_is_another_set_up():
    usual, other = {"steps": 2, "tokens_seen": 64}, {"steps": 1, "tokens_seen": 32}
    records = [
        compared_arms("magicpig", "focus", "lora", seed=seed, lora=lora)
        for seed, lora in enumerate((usual, other, usual))
    ]
    differences = [*records[0].differences, Difference(arm="focus", value=0.1, low=0.0, high=0.2, against="lora")]
    records = [replace(record, differences=differences) for record in records]
    lines = lines_of(select(measurements(runs_of(*records)), {"arm": "focus", "against": "lora"}))
    assert sorted(tuple(line.seeds) for line in together(lines)) == [(0, 2), (1,)]


def test_scores_of_other_items_are_not_taken_together():
    assert len(together([seed_of(0, n=6), seed_of(1, n=6)])) == 1
    assert len(together([seed_of(0, n=6), seed_of(1, n=5)])) == 2
    assert len(together([seed_of(0, version="a"), seed_of(1, version="b")])) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_a_collapse_in_one_of_two_set_ups_of_an_arm_is_one_whichever_came_first(order):
    facts = {"setup": "", "arm": "sinkhorn", "phase": "all", "step": 600, "K": 8}
    lines = [
        line_of(measure=measure, value=value, arm_setup=made, **facts)
        for made, largest in (("usual", 0.2), ("other", 0.99))[::order]
        for measure, value in (("dominance_most", largest), ("dead_groups_most", 0.0))
    ]
    assert stays_even(lines, share=0.5, steps=600, size=1.0, margin=0.05).word != REPRODUCED
    assert takes_over(lines, share=0.9, dead=0.75, steps=600).word == UNDECIDED


def test_a_mask_that_removes_nothing_shows_nothing():
    acting = line_of(value=0.01, low=0.0, high=0.02, arm="a", engaged=True, pairs_removed=0.5)
    idle = line_of(value=0.0, low=-0.01, high=0.01, arm="b", engaged=False, pairs_removed=0.001)
    assert below([acting], 0.1).word == REPRODUCED and below([idle], 0.1).word == NOT_ENGAGED
    found = below([acting, idle], 0.1)
    assert found.word == REPRODUCED and found.lines == [acting] and "b removes 0.1 % of the pairs" in found.why
    assert below([idle], -0.1).word == NOT_REPRODUCED


def test_the_router_of_this_project_is_no_other_method_and_reads_the_past_alone():
    own = Row(
        name="Focus hard k=1", kind="hard", method="focus", causal=True, top_k=1, nll=3.0, perplexity=20.0,
        delta_nll=-0.1, delta_low=-0.2, delta_high=-0.05, pairs_removed=0.5,
    )  # fmt: skip
    says = "a router that reads the past alone"
    config = {"attention": {"method": "focus", "top_k": 1, "groups": 4}}
    record = Record(status="finished", experiment="retrofit_124m", seed=0, rows=[own], config=config)
    assert verdict_on(says, record).word == OTHER_METHOD
    assert verdict_on(says, replace(record, rows=[replace(own, causal=False)])).word == NOT_RUN
    lora = replace(own, name="LoRA, trained", kind="trained", method="full", top_k=None)
    assert verdict_on(says, replace(record, rows=[lora], config={"attention": {"method": "full"}})).word == NOT_RUN


@pytest.mark.parametrize(
    ("ratios", "gpu", "word"),
    [
        ((2.0, 5.0), False, REPRODUCED),
        ((2.0, 5.0), True, SAME_DIRECTION),  # on a CPU, where the paper has a GPU
        ((2.0, 3.0), False, SAME_DIRECTION),  # as fast at one length alone
        ((1.5, 3.0), False, SAME_DIRECTION),
        ((0.9, 3.0), False, NOT_REPRODUCED),
    ],
)
def test_at_least_is_asked_at_every_length(ratios, gpu, word):
    facts = {"low": None, "high": None, "measure": "ratio", "device": "cpu, 2 threads"}
    lines = [Line(value=ratio, tokens=tokens, **facts) for ratio, tokens in zip(ratios, (8192, 1024), strict=True)]
    assert at_least(lines, {1024: 4.0, 8192: 2.0}, gpu=gpu).word == word


def test_a_slowdown_that_the_paper_prints_does_not_decide():
    facts = {"low": None, "high": None, "measure": "ratio", "device": "NVIDIA H100"}
    lines = [Line(value=ratio, tokens=tokens, **facts) for ratio, tokens in ((0.1, 1024), (6.0, 65_536))]
    found = at_least(lines, {1024: 0.2, 65_536: 3.0}, times=0.95, gpu=True)
    assert found.word == REPRODUCED and found.lines == lines
    assert at_least(lines[:1], {1024: 0.2, 65_536: 3.0}, gpu=True).word == UNDECIDED


def test_what_was_timed_on_a_gpu_is_judged_where_the_paper_has_one():
    facts = {"low": None, "high": None, "measure": "ratio", "tokens": 1024}
    cpu, gpu = Line(value=5.0, device="cpu, 2 threads", **facts), Line(value=0.5, device="NVIDIA H200", **facts)
    assert at_least([cpu, gpu], {1024: 4.0}, gpu=True).word == NOT_REPRODUCED
    assert at_least([cpu], {1024: 4.0}, gpu=True).word == SAME_DIRECTION


@pytest.mark.parametrize(("ratios", "word"), [((2.5, 1.5), UNDECIDED), ((1.9, 1.5), SAME_DIRECTION)])
def test_runs_of_one_length_that_disagree_decide_nothing(ratios, word):
    facts = {"low": None, "high": None, "measure": "ratio", "device": "cpu, 2 threads"}
    assert at_least([Line(value=ratio, tokens=8192, **facts) for ratio in ratios], {8192: 2.0}).word == word


def test_a_benchmark_without_a_difference_is_a_line_that_decides_nothing():
    score = BenchmarkRow(attention="focus", kind="hard", task="perplexity@64", metric="perplexity", value=9.0)
    found = select(measurements(runs_of(replace(arms(), benchmarks=[score]))), {"measure": "score_delta"})
    assert found.value.isna().all() and found.tokens.tolist() == [64]


def test_confidence_is_that_of_the_papers_own_assignment_at_its_last_step():
    def at(step, confidence):
        shares = {"dominance": 0.3, "dominance_worst": 0.5, "dead_groups": 0.0, "dead_groups_worst": 0.0}
        return ProbeRow(phase="router", step=step, confidence=confidence, entropy=0.1, **shares)

    for last, groups, word in (
        (0.88, 8, REPRODUCED), (0.99, 8, SAME_DIRECTION), (0.5, 8, NOT_REPRODUCED), (0.88, 4, OTHER_METHOD),
    ):  # fmt: skip
        record = Record(
            status="finished", experiment="leak", probes=[at(0, 0.9), at(60, last)],
            config={"attention": {"groups": groups}},
        )  # fmt: skip
        (found,) = [verdict for claim, verdict in ledger.judged([record]) if "sure of their group" in claim.says]
        assert found.word == word and found.ours.startswith(f"{last:.2f}, K={groups} after 60 steps")


def test_a_gap_to_soft_gates_is_of_its_own_phase():
    phases = [
        Row(name=f"Focus {kind}", kind=kind, method="focus", causal=True, phase=phase, nll=nll)
        for phase, kind, nll in (
            ("router", "soft", 3.5), ("router", "hard", 3.7), ("everything", "soft", 3.0), ("everything", "hard", 3.1),
        )
    ]  # fmt: skip
    record = Record(status="finished", experiment="full_training", config={"attention": {}}, phases=phases)
    found = select(measurements(runs_of(record)), {"of": "phases", "measure": "delta", "against": SOFT_GATE})
    gaps = dict(zip(found.phase, found.value, strict=True))
    assert gaps == {"router": pytest.approx(0.2), "everything": pytest.approx(0.1)}


def test_measurements_are_written_beside_a_report_but_not_committed(tmp_path):
    for top, written in (("runs", True), ("records", False)):
        folder = tmp_path / top / "compare"
        folder.mkdir(parents=True)
        Record(status="finished", experiment="compare", config={"attention": {}}).save(folder / "record.json")
        write_report_of(tmp_path / top, tmp_path / top / "report")
        assert (tmp_path / top / "report" / "measurements.csv").exists() == written
