"""The paper's claims on what groups are made of (section 5), and their judges."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from focus_exp.records.record import Record
from focus_exp.reporting.groups import punctuation_groups
from focus_exp.reporting.printed import paper_rows
from focus_exp.reporting.tables import share_text
from focus_exp.reporting.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED, Claim, Verdict

NEAR = 0.05  # a share this close to the printed one is that share


def groups_claims() -> list[Claim]:
    paper = {str(row["quantity"]): float(row["value"] or 0) for row in paper_rows("groups_section5")}
    purity, confidence = paper["punctuation_purity_percent"], paper["mean_confidence"]
    least, most = paper["smallest_group_percent"], paper["largest_group_percent"]
    return [
        Claim("5", "one group is nearly all punctuation", f"{purity:.0f} % pure", ("groups",), pure(purity / 100)),
        Claim("5", "tokens are sure of their group", f"mean confidence {confidence}", ("groups",), sure(confidence)),
        Claim(
            "5", "every group has its share of the tokens", f"{least:.0f} to {most:.0f} %", ("groups",),
            even(least / 100, most / 100),
        ),
    ]  # fmt: skip


def pure(printed: float) -> Callable[[Record], Verdict]:
    def judge(record: Record) -> Verdict:
        if record.groups is None:
            return Verdict(NOT_RUN, why="there is no analysis", records=[record])
        found = [group.purity or 0.0 for _, group in punctuation_groups(record.groups)]
        word = REPRODUCED if max(found, default=0.0) >= printed - NEAR else NOT_REPRODUCED
        why = "the purest group of any layer" + (f"; on average {share_text(mean(found))}" if found else "")
        return Verdict(word, share_text(max(found, default=0.0)), why, [record])

    return judge


def sure(printed: float) -> Callable[[Record], Verdict]:
    def judge(record: Record) -> Verdict:
        if record.groups is None:
            return Verdict(NOT_RUN, why="there is no analysis", records=[record])
        found = mean(layer.confidence for layer in record.groups.layers)
        word = REPRODUCED if found >= printed - NEAR else NOT_REPRODUCED
        return Verdict(word, f"{found:.2f}", "mean over layers, of the frozen assignment", [record])

    return judge


def even(least: float, most: float) -> Callable[[Record], Verdict]:
    def judge(record: Record) -> Verdict:
        if record.groups is None:
            return Verdict(NOT_RUN, why="there is no analysis", records=[record])
        shares = [group.share for layer in record.groups.layers for group in layer.groups]
        word = REPRODUCED if least - NEAR <= min(shares) and max(shares) <= most + NEAR else NOT_REPRODUCED
        ours = f"{share_text(min(shares))} to {share_text(max(shares))}"
        return Verdict(word, ours, f"of all layers, on held-out text; within {NEAR:.0%} of the printed", [record])

    return judge
