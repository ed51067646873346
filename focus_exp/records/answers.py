"""Which rows of a record stand for its run, for an arm, for a phase of an arm."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isclose

from focus_exp.records.rows import Arm, ProbeRow, Row
from focus_exp.results.record import Record

# shares of the tokens in one group, above which it dominates, and from which on the router has collapsed
DOMINANT, COLLAPSED = 0.5, 0.9


def dominant(groups: int | None, memberships: int = 1) -> float:
    """The share of the tokens, each in so many groups, above which one dominates: the larger of two always has half."""
    return max(DOMINANT, 1.5 * memberships / (groups or 3))


def dominates(share: float, groups: int | None, memberships: int = 1) -> bool:
    return share > dominant(groups, memberships)


def memberships(record: Record) -> int:
    """How many groups a token is in, in the configured hard row, of which `group_shares` are."""
    row = configured_row(record) or answer(record)
    return row.memberships if row else 1


def groups_of(record: Record, name: str | None = None) -> int | None:
    """The number of groups of a run, or of the arm `name` of a comparison."""
    own = [setting for arm in record.arms if arm.name == name for setting in arm.settings]
    changed = dict(setting.partition("=")[::2] for setting in [*record.config.get("every_arm", []), *own])
    return int(changed.get("attention.groups") or record.setting("attention", "groups") or 0) or None


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


def configured_row(record: Record) -> Row | None:
    """The scored hard row at the config's method, top_k and pair rule, if it can be compared with the base."""
    return next((row for row in record.rows if is_configured(record, row) and is_comparable(row)), None)


def is_configured(record: Record, row: Row) -> bool:
    # with one group a token both pair rules keep the same pairs
    return (
        row.kind == "hard"
        and row.method == record.setting("attention", "method")
        and row.top_k in (None, record.setting("attention", "top_k"))
        and (row.top_k == 1 or row.pair_rule in (None, record.setting("attention", "pair_rule")))
    )


def is_comparable(row: Row) -> bool:
    """Whether its loss is one, and not full attention's."""
    return row.scored and row.causal and not keeps_everything(row)


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
