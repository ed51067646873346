"""The paper's claims on group dominance (tables 8 and 9), and their judges."""

from __future__ import annotations

from collections.abc import Callable

from focus_exp.records.answers import COLLAPSED, DOMINANT, Phase, phase_of
from focus_exp.records.record import Record
from focus_exp.reporting.printed import paper_rows
from focus_exp.reporting.tables import share_text
from focus_exp.reporting.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, Claim, Verdict

MOST = 0.75  # of the groups: six of eight


def stability_claims() -> list[Claim]:
    two = {row["method"]: row for row in paper_rows("table8_dominance.two_phase_K8")}
    outcomes = {row["mitigation"]: row["outcome"] for row in paper_rows("table8_dominance")}
    ablation = {(row["parameter"], row["value"]): row for row in paper_rows("table9_ablation")}
    balance, sinkhorn, three = two["softmax_balance_loss"], two["sinkhorn"], ablation["sinkhorn_iterations", 3]
    return [
        Claim(
            "T8", "softmax with a balance loss collapses once everything is trained",
            f"{balance['dominance_centroid']} % to {balance['dominance_full_ft']} %", ("stability",),
            collapses("entropy_balance"),
        ),
        Claim(
            "T8", "a balance loss five times as strong kills most groups", str(outcomes["balance_x5"]), ("stability",),
            collapses("balance_x5"),
        ),
        Claim(
            "T8", "under Sinkhorn no group takes over", f"{sinkhorn['dominance_centroid']} % to "
            f"{sinkhorn['dominance_full_ft']} %", ("stability", "ablation"), stays_even("sinkhorn", "N_10"),
        ),
        Claim(
            "T9", "with three iterations of Sinkhorn one group takes over",
            f"{three['dominance_centroid']} %, then {three['dominance_full_ft']} %", ("ablation", "stability"),
            collapses("N_3"),
        ),
    ]  # fmt: skip


def collapses(arm: str) -> Callable[[Record], Verdict]:
    """Whether one group has taken over, or most groups are dead, after everything was trained."""

    def judge(record: Record) -> Verdict:
        before, after = (phase_of(record, arm, full=full) for full in (False, True))
        if after is None:
            return Verdict(NOT_RUN, why=f"arm {arm} has no probe after all was trained", records=[record])
        shares = (after.probe.dominance, after.probe.dead_groups / _groups(record, after))
        if shares[0] >= COLLAPSED or shares[1] >= MOST:
            word = REPRODUCED
        else:
            word = UNDECIDED if max(shares) > DOMINANT else NOT_REPRODUCED
        why = (
            f"{_trained(record)}; takes over: {COLLAPSED:.0%} of the tokens in one group, or {MOST:.0%} of groups dead"
        )
        return Verdict(word, _course(before, after), why, [record])

    return judge


def stays_even(*names: str) -> Callable[[Record], Verdict]:
    """Whether the largest group stays below half of the tokens and no group dies; names: of one arm, by experiment."""

    def judge(record: Record) -> Verdict:
        arm = next((arm.name for arm in record.arms if arm.name in names), names[0])
        before, after = (phase_of(record, arm, full=full) for full in (False, True))
        if after is None:
            return Verdict(NOT_RUN, why=f"arm {arm} has no probe after all was trained", records=[record])
        probe = after.probe
        if probe.dominance <= DOMINANT and probe.dead_groups < 1:
            word = REPRODUCED
        else:
            word = NOT_REPRODUCED if probe.dominance > DOMINANT else UNDECIDED
        why = f"{_trained(record)}; takes over: more than half of the tokens in one group; balance would be "
        return Verdict(word, _course(before, after), why + share_text(1 / _groups(record, after)), [record])

    return judge


def _groups(record: Record, phase: Phase) -> int:
    own = [s.removeprefix("attention.groups=") for s in phase.arm.settings if s.startswith("attention.groups=")]
    return int(own[-1]) if own else int(record.setting("attention", "groups"))


def _course(before: Phase | None, after: Phase) -> str:
    first = f"{share_text(before.probe.dominance)} to " if before else ""
    worst = f"worst layer {share_text(after.probe.dominance_worst)}"
    return f"{first}{share_text(after.probe.dominance)} ({worst}), {after.probe.dead_groups:.1f} groups dead"


def _trained(record: Record) -> str:
    return f"{record.arms[0].tokens_seen:,} tokens of training"
