"""Which rows of a record stand for its run, for an arm, for a phase of an arm."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isclose

from focus_exp.records.rows import Arm, ProbeRow, Row
from focus_exp.results.record import Record


def answer(record: Record) -> Row | None:
    """The row that stands for a run: its hard groups as configured, its attention method, or its trained weights."""
    method = record.setting("attention", "method", "full")
    configured = [row for row in record.rows if is_configured(record, row)]
    controls = [row for row in record.rows if (row.kind, row.method) == ("control", method)]
    trained = [row for row in record.rows if row.kind == "trained"]
    return next(iter([*configured, *controls, *trained]), None)


def trained_row(record: Record) -> Row | None:
    """The row of what is trained: soft gates before their hard groups, whose loss also falls where they drop less."""
    return next((row for row in record.rows if row.kind == "soft" and row.scored), None) or answer(record)


def is_configured(record: Record, row: Row) -> bool:
    # with one group a token both pair rules keep the same pairs
    return (
        row.kind == "hard"
        and row.method == record.setting("attention", "method")
        and row.top_k in (None, record.setting("attention", "top_k"))
        and (row.top_k == 1 or row.pair_rule in (None, record.setting("attention", "pair_rule")))
    )


def keeps_everything(row: Row) -> bool:
    """Whether a hard row or control keeps every distant pair, that is, is full attention."""
    return row.kind in ("hard", "control") and isclose(row.distant_pairs_kept or 0.0, 1.0)


def row_of(record: Record, arm: str) -> Row | None:
    """The row of a comparison that stands for an arm."""
    return next((row for row in record.rows if row.arm == arm), None)


@dataclass(frozen=True)
class Phase:
    """A phase of an arm: its probes, and its rows where they were measured. `trains`: router or all."""

    arm: Arm
    name: str
    trains: str
    probes: list[ProbeRow]
    soft: Row | None
    hard: Row | None

    @property
    def probe(self) -> ProbeRow:
        """The last one."""
        return self.probes[-1]


def phases(record: Record) -> Iterator[Phase]:
    """Every phase of every arm that was probed, in order."""
    trained = record.setting("recipe", "phases", {})
    for arm in record.arms:
        probes = by_phase(probe for probe in record.probes if probe.arm == arm.name)
        for name, own in probes.items():
            rows = {row.kind: row for row in record.phases if (row.arm, row.phase) == (arm.name, name)}
            hard = rows.get("hard") or (row_of(record, arm.name) if len(probes) == 1 else None)
            trains = trained.get(name, {}).get("trainable", name)
            yield Phase(arm, name, trains, own, rows.get("soft"), hard)


def by_phase(probes: Iterable[ProbeRow]) -> dict[str, list[ProbeRow]]:
    found: dict[str, list[ProbeRow]] = {}
    for probe in probes:
        found.setdefault(probe.phase, []).append(probe)
    return found
