"""What a careful reader of the paper must not copy blindly, each measured: a line a trap and record."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from focus_exp.records.answers import is_configured, keeps_everything
from focus_exp.records.benchmarks import telling
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.reporting.formats import (
    ABSENT,
    NOT_ENGAGED,
    READS_FUTURE,
    change_text,
    difference_text,
    difference_word,
    perplexity_text,
    share_text,
)
from focus_exp.reporting.gather import Runs
from focus_exp.reporting.notes import caveats
from focus_exp.reporting.paper_measures import NOT_RUN
from focus_exp.reporting.paper_report import command_of, where
from focus_exp.reporting.tables import Table

RULE = "retrofit_124m eval.pair_rules=[share]"
COLUMNS = ["trap", "what was measured", "value", "difference [95 %]", "in words", "model and text", "made by"]
# experiment, arm: the routers whose gates are compared; of an experiment on gates every arm
ROUTERS = (("retrofit_124m", None), ("leak", None), ("compare", "focus"), ("compare", "focus_paper"))
GATES = "gates"
IDENTICAL = 1e-3  # nats a token: what float32 and another order of sums leave


@dataclass(frozen=True)
class Finding:
    """A line of the table."""

    record: Record
    what: str
    value: str
    difference: str
    words: str


def traps_table(runs: Runs) -> Table:
    """Traps 1, 2, 3 and 5; one that no record measures says which command would."""
    records = _all(runs)
    found = {
        "sequence-wide Sinkhorn reads the future": (leaks(records), "leak"),
        "the gate that is trained is not the mask that is used": (gaps(records), "retrofit_124m attention=focus_paper"),
        "k > K/2 under the rule share is full attention": (identities(records), RULE),
        "equal benchmarks can mean that nothing was removed": (engagements(records), "compare"),
    }
    rows, shown = [], []
    for trap, (lines, experiment) in found.items():
        rows += [[trap, f.what, f.value, f.difference, f.words, where(f.record), command_of(f.record)] for f in lines]
        shown += [finding.record for finding in lines]
        if not lines:
            rows.append([trap, NOT_RUN, *[ABSENT] * 4, f"python -m focus_exp +experiment={experiment}"])
    return Table(
        columns=COLUMNS,
        rows=rows,
        name="traps",
        title="Traps: what the paper's numbers could be mistaken for",
        notes=[
            *dict.fromkeys(note for record in shown for note in caveats(record)),
            "reads the future: the same trained router once as it is and once with an assignment that looks at a token "
            "alone, on the same tokens",
            "gate: the soft gate of training against the hard mask of inference, the same router on the same tokens",
            f"full attention: every distant pair kept, and a loss within {IDENTICAL} nats a token of the base's",
        ],
    )


def _all(runs: Runs) -> list[Record]:
    """Every finished record, those of arms too, each once."""
    arms = [record for record in runs.arms.values() if record.status == "finished"]
    return sorted([*runs.finished(), *arms], key=lambda record: record.started)


def leaks(records: list[Record]) -> list[Finding]:
    """Trap 1: a router that reads the future against its causal twin."""
    found = []
    for record in records:
        for twin in (row for row in record.rows if row.kind == "twin" and row.scored):
            if twin.nll is None or twin.delta_vs_hard is None:
                continue
            hard = "hard" if twin.top_k else "soft"
            value = f"{perplexity_text(exp(twin.nll - twin.delta_vs_hard))} to {perplexity_text(twin.perplexity)}"
            found.append(_compared(record, f"{_router(record)}, {hard}, as it is to causal", value, twin))
    return found


def _compared(record: Record, what: str, value: str, row: Row) -> Finding:
    delta, low, high = row.delta_vs_hard or 0.0, row.delta_vs_hard_low, row.delta_vs_hard_high
    word = difference_word(delta, low, high, ("better than", "worse than"))
    change = change_text(delta, low, high)
    return Finding(record, what, value, change, f"without the future it is {word} with it")


def gaps(records: list[Record]) -> list[Finding]:
    """Trap 2: from the soft gate to the hard mask, by gate: at one group a query, and as configured."""
    found = []
    for record in records:
        soft = next((row for row in record.rows if row.kind == "soft" and row.scored), None)
        named = (record.experiment, record.config.get("arm")) in ROUTERS or record.experiment == GATES
        if soft is None or not named:
            continue
        gate = record.setting("attention", "gate")
        for hard in record.rows:
            pruned = hard.kind == "hard" and hard.scored and hard.engaged
            if not pruned or not (hard.top_k == 1 or is_configured(record, hard)):
                continue
            gap = (hard.nll or 0.0) - (soft.nll or 0.0)
            value = f"{perplexity_text(soft.perplexity)} to {perplexity_text(hard.perplexity)}"
            words = f"the mask is {'better' if gap < 0 else 'worse'} than the gate that was trained"
            words += "" if hard.causal else f"; {READS_FUTURE}"
            what = f"{_router(record)}, {gate} gate, {hard.name}, {share_text(hard.pairs_removed)} of the pairs removed"
            found.append(Finding(record, what, value, change_text(gap), words))
    return found


def identities(records: list[Record]) -> list[Finding]:
    """Trap 3: rows of several groups a query that keep every pair, against the base."""
    found = []
    for record in records:
        groups = record.setting("attention", "groups", 1)
        for row in record.rows:
            if row.kind != "hard" or (row.top_k or 1) < 2 or row.delta_nll is None:
                continue
            if row.pair_rule != "share" or 2 * (row.top_k or 0) <= groups:
                continue
            same = keeps_everything(row) and abs(row.delta_nll) < IDENTICAL
            value = f"{share_text(row.distant_pairs_kept)} of the distant pairs kept"
            change = change_text(row.delta_nll, row.delta_low, row.delta_high)
            words = "it is the base model" if same else "it is not the base model"
            found.append(Finding(record, f"{_router(record)}, k={row.top_k} of K={groups}", value, change, words))
    return found


def engagements(records: list[Record]) -> list[Finding]:
    """Trap 5: what the mask of Focus removed on every benchmark's own requests."""
    found = []
    for record in records:
        if record.config.get("arm"):  # its comparison has the same rows
            continue
        first = record.arms[0].name if record.arms else ""
        for row in telling([row for row in record.benchmarks if row.scored and row.kind == "hard"]):
            if row.engaged is None or (first and row.attention != first):
                continue
            value = f"{share_text(row.pairs_removed)} of the pairs removed"
            words = "engaged: the score says something" if row.engaged else f"{NOT_ENGAGED}: equal by construction"
            found.append(Finding(record, f"{row.task} under {row.attention}", value, difference_text(row), words))
    return found


def _router(record: Record) -> str:
    arm = record.config.get("arm")
    return f"{record.experiment}{f' {arm}' if arm else ''}, seed {record.seed}"
