"""How evenly the arms of a comparison keep their groups, after each phase, beside the paper's tables 8 and 9."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from focus_exp.records.answers import Phase, phases
from focus_exp.records.record import Record
from focus_exp.reporting.comparison import NON_CAUSAL
from focus_exp.reporting.printed import paper_rows
from focus_exp.reporting.tables import ABSENT, Table, caveats, identity, origin, perplexity_text, share_text, title

COLUMNS = [
    *("arm", "after", "steps", "largest group (worst layer)", "dead groups (worst layer)", "stability (renamed)"),
    *("confidence", "perplexity, soft", "perplexity, hard", "paper"),
]
# arms of +experiment=stability: the rows of table 8 and of its two-phase test that they stand for
MITIGATIONS = {
    "entropy_balance": ("entropy_balance_loss", "softmax_balance_loss"),
    "stop_gradient": ("stop_gradient", None),
    "ema": ("ema_centroids", None),
    "recluster": ("recluster_100", None),
    "balance_x5": ("balance_x5", None),
    "sinkhorn": ("sinkhorn", "sinkhorn"),
}
# arms of +experiment=ablation, N_3 under more seeds of stability too: parameter and value in table 9, whose windows are
# of 1,024 tokens
ABLATIONS: dict[str, tuple[str, float]] = {
    "default": ("groups", 8),
    **{f"K_{groups}": ("groups", groups) for groups in (4, 16, 32)},
    **{f"w_{share}": ("window", 1024 // part) for share, part in (("sixteenth", 16), ("quarter", 4), ("half", 2))},
    **{f"tau_{value}": ("temperature", value) for value in (0.05, 0.2, 0.5)},
    **{f"N_{iterations}": ("sinkhorn_iterations", iterations) for iterations in (3, 5, 10, 20)},
}


def stability_table(record: Record) -> Table:
    """One line a phase of an arm."""
    found = list(phases(record))
    return Table(
        columns=COLUMNS,
        rows=[_cells(record, phase) for phase in found],
        name="stability",
        title=f"{title(record)}: groups after each phase",
        notes=[
            *caveats(record),
            "largest group, dead groups (under 1 % of the tokens), stability, confidence: of the same held-out tokens "
            "under soft gates, means over layers",
            "stability: share of those tokens whose group is that of the probe before, in brackets if groups may "
            "change their numbers; the paper does not define its own",
            "perplexity, soft: of the gates that were trained; hard: of the groups as they are used",
            "the paper's numbers: of GPT-2 124M on PG-19",
            origin(record),
        ],
        values=[_values(record, phase) for phase in found],
    )


def _cells(record: Record, phase: Phase) -> list[str]:
    probe, causal = phase.probe, (phase.hard or phase.soft)
    return [
        phase.arm.name + (f" ({NON_CAUSAL})" if causal and not causal.causal else ""),
        phase.name,
        f"{probe.step:,}",
        f"{share_text(probe.dominance)} ({share_text(probe.dominance_worst)})",
        f"{probe.dead_groups:.1f} ({probe.dead_groups_worst:.0f})",
        ABSENT if probe.stability is None else f"{probe.stability:.3f} ({probe.stability_renamed:.3f})",
        f"{probe.confidence:.2f}",
        *(perplexity_text(row.perplexity if row else None) for row in (phase.soft, phase.hard)),
        printed(record, phase) or ABSENT,
    ]


def _values(record: Record, phase: Phase) -> dict[str, Any]:
    measured = {
        f"{row_kind}_{key}": getattr(row, key) if row else None
        for row_kind, row in (("soft", phase.soft), ("hard", phase.hard))
        for key in ("perplexity", "perplexity_low", "perplexity_high", "nll", "delta_nll", "largest_group", "causal")
    }
    return {
        "experiment": record.experiment,
        **asdict(phase.probe),
        "settings": " ".join(phase.arm.settings),
        **measured,
        "paper": printed(record, phase),
        **identity(record),
    }


def printed(record: Record, phase: Phase) -> str:
    """What the paper prints of this arm after such a phase; "" for nothing."""
    if record.experiment not in ("stability", "ablation"):
        return ""
    return ", ".join([*_table8(phase), *_table9(phase)])


def _table8(phase: Phase) -> list[str]:
    outcome, test = MITIGATIONS.get(phase.arm.name, (None, None))
    suffix = "full_ft" if phase.full else "centroid"
    said = []
    for row in paper_rows("table8_dominance.two_phase_K8"):
        if row["method"] == test:
            said += [f"largest group {row[f'dominance_{suffix}']} %", f"stability {row[f'stability_{suffix}']}"]
    if phase.full:
        said += [str(row["outcome"]) for row in paper_rows("table8_dominance") if row["mitigation"] == outcome]
    return said


def _table9(phase: Phase) -> list[str]:
    perplexity, suffix = ("ppl_finetuned", "full_ft") if phase.full else ("ppl_centroid", "centroid")
    return [
        f"perplexity {row[perplexity]}, largest group {row[f'dominance_{suffix}']} %"
        for row in paper_rows("table9_ablation")
        if (row["parameter"], row["value"]) == ABLATIONS.get(phase.arm.name)
    ]
