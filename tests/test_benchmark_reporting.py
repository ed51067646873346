"""The benchmark table and its sentences: what is evidence, what is not, and what went wrong."""

import csv
import io
from dataclasses import replace

import pytest

from focus_exp.records.benchmarks import BenchmarkRow, telling
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.reporting import findings
from focus_exp.reporting.tables import table_of

RECORD = Record(status="finished", experiment="test", seed=7, config={"eval": {"window": 64}}, model={"name": "tiny"})
ENGAGED = {
    "distant_share": 0.6, "distant_pairs_kept": 0.3, "pairs_removed": 0.42, "removed_by_layer": [0.4, 0.44],
    "requests": 8, "request_tokens": [300, 310, 400, 490, 500], "largest_group": 0.3,
}  # fmt: skip
IDLE = {**ENGAGED, "distant_share": 0.02, "pairs_removed": 0.01, "removed_by_layer": [0.01, 0.01]}


def benchmark_findings(rows, groups=None):
    return [*findings.benchmark_findings(rows, groups)]


@pytest.mark.parametrize(("largest", "memberships", "warned"), [(0.488, 2, True), (0.488, 1, False), (0.3, 2, False)])
def test_a_group_that_is_one_of_two_of_nearly_all_tokens_is_told_of(largest, memberships, warned):
    row = replace(hard("perplexity@64", 0.0), largest_group=largest, memberships=memberships)
    said = [line for line in benchmark_findings([base("perplexity@64"), row], 4) if "of a layer's tokens" in line]
    assert len(said) == warned and all("97.6 %" in line for line in said)


def base(task: str, metric: str = "acc", value: float = 0.5, **fields) -> BenchmarkRow:
    ledger = {
        "requests": 8,
        "request_tokens": [300, 310, 400, 490, 500],
        "pairs_removed": 0.0,
        "distant_pairs_kept": 1.0,
    }
    common = {"n": 50, "stderr": 0.03, "version": "1.0", "shots": 0, "seed": 1234, "source": "somewhere"}
    return BenchmarkRow(
        **{"attention": "base, full attention", "kind": "base", "task": task, "metric": metric, "value": value}
        | common | ledger | fields
    )  # fmt: skip


def hard(task: str, difference: float, half: float = 0.05, metric: str = "acc", ledger: dict = ENGAGED, **fields):
    bounds = {"difference": difference, "difference_low": difference - half, "difference_high": difference + half}
    named = {"attention": "Focus hard k=1", "kind": "hard", "method": "focus", "value": 0.5 + difference}
    return base(task, metric, **{**named, **bounds, **ledger, **fields})


def control(task: str, difference: float, half: float = 0.05, **fields) -> BenchmarkRow:
    named = {"attention": "window + sinks only", "kind": "control", "method": "window"}
    return hard(task, difference, half, **{**named, "distant_pairs_kept": 0.0, **fields})


def test_from_five_per_cent_on_a_mask_is_engaged():
    assert [hard("t", 0, ledger={"pairs_removed": share}).engaged for share in (0.0499, 0.05)] == [False, True]
    assert base("t").engaged is None and hard("t", 0, kind="trained").engaged is None


def test_the_table_keeps_tasks_together_and_says_what_was_removed():
    rows = [
        base("one"),
        base("two", "perplexity", 12.0),
        hard("one", -0.04),
        hard("two", 0.1, metric="perplexity", ledger=IDLE),
    ]
    table = table_of(replace(RECORD, benchmarks=rows), "benchmarks")
    assert [(row[0], row[2]) for row in table.rows] == [
        ("one", "base, full attention"), ("one", "Focus hard k=1"),
        ("two", "base, full attention"), ("two", "Focus hard k=1"),
    ]  # fmt: skip
    lines = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [line["score ± s.e."] for line in lines[:3]] == ["50.0 ± 3.0 %", "46.0 ± 3.0 %", "12.00 ± 0.03"]
    differences = [line["vs full attention [95 %]"] for line in lines]
    assert differences == ["-", "-4.0 [-9.0, +1.0] points", "-", "+10.52 % [+5.13, +16.18]"]
    assert [line["pairs removed"] for line in lines] == ["0.0 %", "42.0 %", "0.0 %", "1.0 % (not engaged)"]
    assert lines[0]["request tokens"] == "400 (300 to 500)" and lines[0]["n"] == "50"
    assert any("under 5 %" in note for note in table.notes)
    assert "one, two: items of somewhere, version 1.0" in table.notes
    assert "not engaged" in table.to_markdown()


def test_csv_holds_the_numbers_unrounded_and_where_they_came_from():
    rows = [base("one"), hard("one", -1 / 3)]
    line = list(csv.DictReader(io.StringIO(table_of(replace(RECORD, benchmarks=rows), "benchmarks").to_csv())))[1]
    assert float(line["difference"]) == -1 / 3 and line["engaged"] == "True"
    assert line["request_tokens"] == "300 310 400 490 500" and line["removed_by_layer"] == "0.4 0.44"
    assert (line["seed"], line["fewshot_seed"], line["model"]) == ("7", "1234", "tiny")


def test_failures_cuts_and_readers_of_the_future_stay_visible():
    rows = [
        BenchmarkRow(attention="", kind="missing", task="truthfulqa_mc1", error="only on the hub"),
        base("long", truncated=3),
        hard("long", 0.2, causal=False),
        replace(hard("long", 0), attention="other", error="RuntimeError: out of memory", value=None),
    ]
    table = table_of(replace(RECORD, benchmarks=rows), "benchmarks")
    markdown = table.to_markdown()
    assert "truthfulqa_mc1 was not measured: only on the hub" in markdown
    assert "long under other failed: RuntimeError: out of memory" in markdown
    assert "3 of 8 CUT" in markdown and "(reads the future)" in markdown
    said = benchmark_findings(rows)
    assert any("Focus hard k=1 is not causal" in sentence for sentence in said)
    assert not any("better than" in sentence for sentence in said)
    assert said[-2:] == table.notes[:2]


def test_only_tasks_on_which_the_mask_acted_are_evidence():
    rows = [
        *(base(task) for task in ("hellaswag", "passkey", "copying", "induction", "piqa")),
        hard("hellaswag", 0.0, ledger=IDLE), hard("piqa", 0.0, ledger=IDLE),
        hard("passkey", -0.2), hard("copying", 0.01), hard("induction", 0.3),
    ]  # fmt: skip
    verdict, idle = benchmark_findings(rows)
    assert verdict == (
        "Focus hard k=1: of 3 tasks on which its mask acted, each by its own interval, 1 worse than full attention "
        "(passkey acc -20.0 [-25.0, -15.0] points); 1 better than full attention (induction acc +30.0 [+25.0, +35.0] "
        "points); 1 indistinguishable from it, where losses of up to 4.0 points cannot be excluded."
    )
    assert idle.startswith("Focus hard k=1 was not engaged on hellaswag (1.0 %), piqa (1.0 %): under 5 %")
    assert "no evidence of zero degradation" in idle
    only_idle = benchmark_findings([base("piqa"), hard("piqa", 0.0, ledger=IDLE)])
    assert only_idle[-1] == "No task shows whether Focus hard k=1 degrades anything." and len(only_idle) == 2


def test_a_higher_perplexity_is_worse_and_a_lower_one_better():
    higher, lower = hard("a", 0.2, metric="perplexity", higher_is_better=False), hard("b", -0.2, metric="perplexity")
    said = benchmark_findings([base("a"), base("b"), higher, replace(lower, higher_is_better=False)])[0]
    assert "1 worse than full attention (a perplexity +22.14 %" in said
    assert "1 better than full attention (b perplexity -18.13 %" in said
    large = replace(hard("perplexity@64", 2.0, 0.1, "perplexity"), higher_is_better=False)
    assert "(perplexity@64 +2.0 [+1.9, +2.1] nats)" in benchmark_findings([base("perplexity@64"), large])[0]


def test_adapted_weights_are_judged_on_every_task():
    rows = [base("hellaswag"), hard("hellaswag", -0.1, attention="LoRA r=4, trained", kind="trained", ledger={})]
    assert benchmark_findings(rows) == [
        "LoRA r=4, trained: of 1 task, 1 worse than full attention (hellaswag acc -10.0 [-15.0, -5.0] points)."
    ]


def test_a_loss_in_any_metric_is_a_loss():
    rows = [base("t", metric) for metric in ("perplexity", "acc", "acc_norm")]
    assert [row.metric for row in telling(rows)] == ["acc_norm"]
    assert [row.metric for row in telling(rows[:2])] == ["acc"] and telling(rows[:1]) == rows[:1]
    same, better = hard("t", 0.0, metric="acc_norm"), hard("t", 0.2, metric="acc")
    worse = hard("t", 0.2, metric="perplexity", higher_is_better=False)
    assert telling([same, better, worse]) == [worse] and telling([same, better]) == [better]
    assert telling([same, hard("t", 0.01, metric="acc")]) == [same]


def test_tasks_that_the_window_solves_alone_are_named():
    rows = [
        base("easy"),
        base("needed"),
        hard("easy", 0),
        hard("needed", 0),
        control("easy", 0),
        control("needed", -0.4),
    ]
    (sentence,) = [said for said in benchmark_findings(rows) if "window and sinks alone" in said]
    assert sentence.startswith("On easy the window") and "needed" not in sentence


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        ({"distant_pairs_kept": 1.0, "pairs_removed": 0.0}, "keeps every distant pair: this is full attention"),
        ({"distant_pairs_kept": 0.0, "pairs_removed": 0.6}, "keeps no distant pair: this is window and sinks alone"),
        ({"largest_group": 0.97}, "one group holds 97.0 % of a layer's tokens"),
    ],
)
def test_broken_routers_are_called_so(ledger, said):
    healthy, broken = ([base("t"), hard("t", 0, ledger={**ENGAGED, **more})] for more in ({}, ledger))
    assert any(said in sentence for sentence in benchmark_findings(broken))
    assert not any(said in sentence for sentence in benchmark_findings(healthy))


def test_a_control_is_judged_where_it_is_all_there_is():
    rows = [base("t"), control("t", -0.4)]
    assert benchmark_findings(rows)[0].startswith("window + sinks only: of 1 task on which its mask acted, 1 worse")
    assert not any(said.startswith("window + sinks only") for said in benchmark_findings([*rows, hard("t", 0)]))


def test_a_method_without_a_mask_is_neither_engaged_nor_idle():
    removed = {"kind": "control", "pairs_removed": 0.0}
    assert BenchmarkRow(attention="performer", task="t", method="performer", **removed).engaged is None
    assert BenchmarkRow(attention="window", task="t", method="window", **removed).engaged is False
    assert Row(name="performer", method="performer", causal=True, **removed).engaged is None
