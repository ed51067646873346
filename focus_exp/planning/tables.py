"""What a planned run needs, as tables: a line per run, and for a single one a line per way to lay it out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from focus_exp.reporting.text_table import ABSENT, Table

GIB = 2**30


@dataclass(kw_only=True)
class PlanRow:
    """One run. Bytes are those of one GPU at the worst moment under `setting`, by kind in `held`; activations without
    and with gradient checkpointing; cache: keys and values of an evaluation's batch, which is not there then.

    download: bytes of the weights as the hub stores them. flops: of all matrix products, pair_flops of those on pairs
    of tokens. A run that does not fit has `error` and the numbers of what comes closest.
    """

    run: str
    setting: str = ""
    gpus: int = 1
    parameters: int = 0
    trainable: int = 0
    download: float | None = None
    held: dict[str, float] = field(default_factory=dict)
    activations: float = 0.0
    checkpointed: float = 0.0
    cache: float = 0.0
    main_memory: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    pair_flops: float = 0.0
    hours: float = 0.0
    bound: str = ""
    overrides: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def total(self) -> float:
        return sum(self.held.values())


@dataclass(kw_only=True)
class ExperimentRow:
    """The arms of an experiment that take the same: `runs` of them with their tries of learning rates."""

    experiment: str
    arms: list[str]
    runs: int
    each: PlanRow

    @property
    def gpu_hours(self) -> float:
        return 0.0 if self.each.error else self.runs * self.each.gpus * self.each.hours


@dataclass(kw_only=True)
class LayoutRow:
    """One way to lay a run out, plain and with gradient checkpointing: GPUs, bytes on each, hours.

    None: no number of GPUs is enough, and then the bytes are those on the most.
    """

    layout: str
    plain: tuple[int | None, float, float] = (None, 0.0, 0.0)
    checkpointed: tuple[int | None, float, float] = (None, 0.0, 0.0)
    main_memory: float = 0.0


def runs_table(rows: list[PlanRow], gpu: str, notes: list[str]) -> Table:
    columns = [
        *("run", "parameters", "trained", "weights", "gradients", "AdamW", "activations (ckpt)", "logits"),
        *("KV cache", "in all", "GPUs", "tokens", "PFLOP", "time"),
    ]
    return Table(
        columns=columns,
        rows=[cells(row) for row in rows],
        name="plan",
        title=f"Memory [GiB] of each {gpu}, arithmetic and time",
        notes=notes,
        values=[asdict(row) for row in rows],
    )


def cells(row: PlanRow) -> list[str]:
    held = {kind: gib_text(size) for kind, size in row.held.items()}
    share = row.trainable / row.parameters
    weights = gib_text(row.held.get("weights", 0) + row.held.get("gathered", 0))
    return [
        row.run,
        f"{row.parameters:,}",
        f"{row.trainable:,} ({100 * share:.3g} %)",
        weights,
        held.get("gradients", ABSENT),
        held.get("optimizer", ABSENT),
        f"{gib_text(row.activations)} ({gib_text(row.checkpointed)})",
        held.get("logits", ABSENT),
        gib_text(row.cache),
        gib_text(row.total),
        "no" if row.error else f"{row.gpus} x {row.setting}",
        f"{row.tokens:,}" if row.tokens else ABSENT,
        f"{row.flops / 1e15:,.4g}" if row.flops else ABSENT,
        time_text(row.hours),
    ]


def experiments_table(rows: list[ExperimentRow], gpu: str, scale: str, utilization: float) -> Table:
    """A line for every kind of training run of an experiment; in the notes what all of an experiment's take."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.experiment] = totals.get(row.experiment, 0.0) + row.gpu_hours
    sums = "; ".join(f"{name} {hours_text(hours)}" for name, hours in totals.items())
    return Table(
        columns=["experiment", "arms", "runs", "each on", "each [GiB]", "tokens of each", "time of each", "GPU hours"],
        rows=[[row.experiment, ", ".join(row.arms), str(row.runs), *experiment_cells(row)] for row in rows],
        name="plans",
        title=f"What training takes at scale={scale}: memory, time and number of {gpu}",
        notes=[
            f"GPU hours of one seed: {sums}; all {hours_text(sum(totals.values()))}. Other seeds share the tries",
            "runs: arms, and their tries of learning rates. Fitting routers, balancing and evaluation are not counted",
            f"time: arithmetic at {100 * utilization:.0f} % of the card's peak (plan.utilization), a lower bound for "
            "small models, whose steps of one text wait for kernels to be launched",
            *(f"{row.experiment}, {', '.join(row.arms)}: {row.each.error}" for row in rows if row.each.error),
        ],
        values=[
            {"experiment": row.experiment, "arms": " ".join(row.arms), "runs": row.runs, "gpu_hours": row.gpu_hours}
            | asdict(row.each)
            | {"held": row.each.total, "overrides": " ".join(row.each.overrides)}
            for row in rows
        ],
    )


def hours_text(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def experiment_cells(row: ExperimentRow) -> list[str]:
    each = row.each
    if each.error:
        return [ABSENT] * 5
    return [
        *(f"{each.gpus} x {each.setting}", gib_text(each.total), f"{each.tokens:,}", time_text(each.hours)),
        hours_text(row.gpu_hours),
    ]


def layouts_table(rows: list[LayoutRow], gpu: str) -> Table:
    plain = ["GPUs", "each [GiB]", "time"]
    return Table(
        columns=["layout", *plain, *(f"{column}, checkpointed" for column in plain), "main memory [GiB]"],
        rows=[
            [
                row.layout,
                *layout_cells(*row.plain),
                *layout_cells(*row.checkpointed),
                gib_text(row.main_memory) if row.main_memory else ABSENT,
            ]
            for row in rows
        ],
        name="layouts",
        title=f"Ways to lay it out, each on the fewest {gpu} that are enough",
        values=[asdict(row) for row in rows],
    )


def layout_cells(gpus: int | None, held: float, hours: float) -> list[str]:
    return ["too few", gib_text(held), ABSENT] if gpus is None else [str(gpus), gib_text(held), time_text(hours)]


def gib_text(size: float) -> str:
    """Three digits, none below a MiB."""
    gib = size / GIB
    return "0" if gib < 1e-3 else f"{gib:,.3f}" if gib < 1 else f"{gib:,.1f}"


def time_text(hours: float) -> str:
    """In the unit that suits it; absent where nothing is trained."""
    if not hours:
        return ABSENT
    for unit, size in (("h", 1.0), ("min", 1 / 60)):
        if hours >= size:
            return f"{hours / size:,.1f} {unit}"
    return f"{3600 * hours:.2g} s"
