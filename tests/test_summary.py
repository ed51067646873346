"""The one screen at the top of the report, the words of the ledger above it, and what the measurements can show."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_compare import compared, comparison_of, row

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.records.rows import Row, Units
from focus_exp.reporting.claims import judged_runs, verdicts_table
from focus_exp.reporting.formats import UNDECIDED, VERDICTS, commit_text
from focus_exp.reporting.gather import Runs, gather
from focus_exp.reporting.measured import lines_of
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.notes import intervals_text
from focus_exp.reporting.selection import select
from focus_exp.reporting.summary import summary
from focus_exp.reporting.together import together, wanting
from focus_exp.reporting.trust import power_table

RECORDS = Path(__file__).parent.parent / "runs" / "records"


def runs_of(*records):
    return Runs([(Path(str(number)), record) for number, record in enumerate(records)])


def routed(seed, delta, random=0.04, half=0.01, units=None):
    """A router beside its base and random groups, of 12 windows of 31 scored tokens."""
    known = {"tokens": 12 * 31, "causal": True, "pairs_removed": 0.5, "nll": 3.0 + delta, "perplexity": 20.0}
    bounds = {"delta_nll": delta, "delta_low": delta - half, "delta_high": delta + half}
    versus = {"delta_vs_hard": random, "delta_vs_hard_low": random - half, "delta_vs_hard_high": random + half}
    rows = [
        Row(name="base, full attention", kind="base", method="full", causal=True, nll=3.0, perplexity=20.0),
        Row(name="Focus hard k=1", kind="hard", method="focus", top_k=1, **known, **bounds),
        Row(name="random groups, same sizes", kind="control", method="random_groups", top_k=1, **known, **versus),
        Row(name="window 9 + sinks, as many pairs", kind="control", method="window", window=9, **known, **versus),
    ]
    config = {"attention": {"method": "focus", "top_k": 1, "groups": 4}, "eval": {"window": 32}}
    facts = {"model": {"name": "m", "revision": "4-bit"}, "data": {"name": "d", "tokens": {"test": 999}}}
    return Record(
        status="finished", experiment="retrofit_124m", seed=seed, rows=rows, config=config, units=units, **facts
    )  # fmt: skip


def said(*records):
    runs = runs_of(*records)
    return summary(runs, judged_runs(runs))


@pytest.mark.parametrize(
    ("delta", "random", "word"), [(0.03, 0.04, "At a price"), (-0.03, 0.04, "Yes"), (0.03, 0.0, "That is not shown")]
)
def test_whether_it_works_follows_from_the_measurements(delta, random, word):
    first, *_ = said(*(routed(seed, delta + seed / 1000, random) for seed in range(3)))
    assert first.startswith(f"Does it work? {word}: on one model (m, 4-bit)") and "removes 50.0 % of the pairs" in first


def test_what_seeds_kept_is_said_as_their_mean():
    def removing(seed, share):
        record = routed(seed, 0.03)
        return replace(record, rows=[replace(row, pairs_removed=share) if row.method else row for row in record.rows])

    first, *_ = said(removing(0, 0.5), removing(1, 0.6), removing(2, 0.64))
    assert "removes 58.0 % of the pairs" in first


def test_of_several_set_ups_the_one_measured_on_most_text_is_said():
    few, many = routed(0, 0.01), routed(0, 0.05)
    few.rows[1:] = [replace(row, tokens=6 * 31) for row in few.rows[1:]]
    many.config["eval"] = {"window": 32, "max_windows": 9}
    assert all("+5.13 %" in said(*records)[0] for records in ([few, many], [many, few]))


def test_controls_of_another_run_say_nothing_of_a_router():
    alone, other = routed(0, 0.05), routed(0, 0.01)
    alone.rows[1:] = [replace(alone.rows[1], tokens=99 * 31)]
    other.model["name"] = "another"
    first, *_ = said(alone, other)
    assert "That is not shown" in first and "+5.13 %" in first and "andom" not in first and "window" not in first
    controls = alone.rows[:2] + other.rows[3:]
    first, *_ = said(replace(alone, rows=controls), other)
    assert first.endswith("A window with as many pairs comes to +4.08 % [+3.05, +5.13] against it.")


def test_versions_and_what_is_not_known_are_said_where_there_are_some():
    runs = runs_of(routed(0, 0.03))
    *_, sure, _, unknown = summary(runs, [])
    assert sure.endswith("records are of 1 version of the code.") and unknown.startswith("Not engaged")
    *_, sure, _, _ = summary(runs_of(routed(0, 0.03), replace(routed(1, 0.03), commit="b")), [], ["replications.md"])
    assert "of 2 versions of the code, runs of which" in sure and sure.endswith("(replications.md).")


def test_of_texts_of_one_length_the_most_are_said_and_what_they_are():
    def far(seed, difference, texts, units=None):
        bounds = {"difference": difference, "difference_low": difference - 0.01, "difference_high": difference + 0.01}
        rows = [
            BenchmarkRow(
                attention=arm, kind="hard", task=f"perplexity@{length}", metric="perplexity", value=20.0,
                higher_is_better=False, n=texts, requests=texts, **bounds,
            )
            for arm in ("k_2_share", "k_2") for length in (1024, 8192)
        ]  # fmt: skip
        found = comparison_of(row("k_2_share", kind="hard"), row("k_2", kind="hard"), benchmarks=rows)
        config = {"attention": {"method": "focus"}, "eval": {"max_windows": texts}}
        return replace(found, experiment="long_context", seed=seed, config=config, units=units)

    few, many = far(1, 0.1, 2), far(0, 0.05, 6, Units(kind="document", count=6, windows=8, freedom=5.0))
    for records in ([few, many], [many, few]):
        (price,) = [sentence for sentence in said(*records) if sentence.startswith("The price by length")]
        assert "at 8,192 (6 documents)" in price and price.count("+5.13 %") == 3 and "+10.52 %" not in price


def test_a_longer_run_of_another_model_or_text_is_no_longer_run_of_this_one():
    records = [routed(seed, 0.03) for seed in range(3)]
    for changed in ({"model": {"name": "other", "revision": "1"}}, {"data": {"name": "other", "tokens": {"test": 9}}}):
        longer = [replace(routed(seed, -0.1), steps=4000, **changed) for seed in range(3)]
        first, *_ = said(*records, *longer)
        assert "after 4000 it is lower" not in first
    assert (
        "after 4000 it is lower" in said(*records, *(replace(routed(seed, -0.1), steps=4000) for seed in range(3)))[0]
    )


def test_without_records_every_question_says_what_would_answer_it():
    sentences = said()
    assert sentences[0] == "Does it work? Not measured with 4 groups: python -m focus_exp +experiment=retrofit_124m"
    assert sum("+experiment=" in sentence for sentence in sentences) == 6


def test_a_sentence_does_without_what_is_optional():
    measured = [run for run in gather(RECORDS).named.values() if any(row.arm == "sparq" for row in run.rows)]
    whole = next(run for run in measured if run.experiment == "frontier")
    fewer = replace(whole, benchmarks=[row for row in whole.benchmarks if row.attention != "sparq"])
    (long,), (short,) = ([text for text in said(run) if "focus_dual" in text] for run in (whole, fewer))
    assert long.startswith(short.rstrip(".")) and "SparQ" in long and "SparQ" not in short


def test_the_screen_is_said_of_the_committed_records_and_counts_as_the_ledger_does():
    runs = gather(RECORDS)
    ledger = judged_runs(runs)
    sentences = summary(runs, ledger)
    assert not any("python -m" in sentence or "{" in sentence for sentence in sentences)
    assert 5 < len(sentences) < 10 and len(" ".join(sentences)) < 6000
    words = [verdict.word for _, verdict in ledger]
    assert [int(count) for _, count, _ in verdicts_table(ledger).rows] == [words.count(w) for w in [*VERDICTS][1:]]
    assert all(verdict.needs for _, verdict in ledger if verdict.word == UNDECIDED)
    lines = power_table([(claim.says, verdict.line) for claim, verdict in ledger if verdict.line]).values
    by = {line["comparison"]: line for line in lines}
    assert len(lines) > 8 and by["focus against performer"]["seeds for 1 %"] > by["lora against focus"]["seeds for 1 %"]


def test_an_interval_is_as_wide_as_its_units_say():
    record = routed(0, 0.1, units=Units(kind="document", count=6, windows=12, freedom=4.5))
    (line,) = lines_of(select(measurements(runs_of(record)), {"against": "base", "kind": "hard"}))
    assert (line.stderr, line.freedom, line.units) == (pytest.approx(0.01 / 2.66, rel=0.01), 4.5, 6)
    assert "Student's t over 6 documents of 12 windows" in intervals_text(record)


def test_of_a_seed_the_latest_counts_and_other_set_ups_stay_apart():
    records = [routed(0, 0.9), routed(0, 0.03), routed(1, 0.04), routed(2, 0.05)]
    table = select(measurements(runs_of(*records)), {"against": "base", "kind": "hard"})
    (line,) = together(lines_of(table))
    assert line.value == pytest.approx(0.04) and line.seeds == [0, 1, 2] and len(line.runs) == 4
    assert line.high - line.value > 0.01 and line.deviation_of_seeds == pytest.approx(0.01)
    other = replace(records[0], model={"name": "m", "fingerprint": "another"})
    assert (
        len(together(lines_of(select(measurements(runs_of(*records, other)), {"kind": "hard", "against": "base"}))))
        == 2
    )


def test_what_is_wanting_is_what_limits():
    noisy = [routed(seed, delta, half=0.001) for seed, delta in enumerate((0.0, 0.05, 0.1))]
    (line,) = together(lines_of(select(measurements(runs_of(*noisy)), {"against": "base", "kind": "hard"})))
    assert wanting(line) == "199 seeds for 1.0 %" and wanting(line, math.log(1.05)) == "11 seeds for 5.0 %"
    (alone,) = together(lines_of(select(measurements(runs_of(noisy[0])), {"against": "base", "kind": "hard"})))
    assert wanting(alone) == "3 seeds for 1.0 %"


def test_a_dirty_commit_is_shown_as_one():
    assert (
        commit_text("b3ebe21" + "0" * 33 + "-dirty") == "b3ebe21-dirty"
        and commit_text("b3ebe21" + "0" * 33) == "b3ebe21"
    )
    assert commit_text(None) == "no commit"


def test_a_comparison_says_what_its_intervals_are_over():
    found = comparison_of(row("focus", kind="hard"), row("lora", kind="trained", **compared(0.1)))
    assert "over 600 documents, paired" in intervals_text(found)
