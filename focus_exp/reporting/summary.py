"""The one screen at the top of the report, from summary.yaml."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from focus_exp.reporting.claims import Claim, Verdict
from focus_exp.reporting.formats import VERDICTS, difference_word
from focus_exp.reporting.gather import Runs
from focus_exp.reporting.measured import Line, lines_of
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.selection import check, said_of_runs, select
from focus_exp.reporting.specs import read_specs, template
from focus_exp.reporting.together import together


@dataclass(frozen=True)
class Chosen:
    """Lines of the measurements, as in claims.yaml."""

    experiments: list[str]
    select: dict[str, Any]
    where: str = ""
    beside: str = ""
    alike: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Sentence:
    """An entry of summary.yaml, which says what its keys are."""

    say: str
    lines: dict[str, Chosen] = field(default_factory=dict)
    without: str = ""


def summary(runs: Runs, ledger: list[tuple[Claim, Verdict]], apart: Collection[str] = ()) -> list[str]:
    """Does it work, for what, at what price, how sure, what is not known.

    apart: the files of tables of no record that there are.
    """
    records = [record for record in runs.named.values() if record.counts]
    known = {
        "record": lambda line: runs.named[line.run],
        "told": lambda line: difference_word(line.value, line.low, line.high, ("lower than", "higher than")),
        "seeds": lambda seeds: f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}",
        "versions": len({record.commit for record in records}),
        "apart": apart,
        "claims": len(ledger),
        "verdicts": {word: [one for one in ledger if one[1].word == word] for word in VERDICTS},
    }
    return [*_said(runs, known)]


def _said(runs: Runs, known: dict[str, Any]) -> Iterator[str]:
    table = select(said_of_runs(measurements(runs)), {}, "error.isna() and value.notna()")
    for sentence in read_specs("summary", list[Sentence]):
        lines: dict[str, Line | None] = {}
        for name, chosen in sentence.lines.items():
            check(f"summary.yaml: {name}", chosen.select, chosen.where)
            cells = {"experiment": chosen.experiments, **chosen.select}
            found = together(lines_of(select(table, cells, chosen.where)))
            if chosen.beside:
                of = lines[chosen.beside]
                found = [line for line in found if of and line.setup == of.setup]
            if chosen.alike:
                of = lines[chosen.alike]
                found = [line for line in found if of and (line.model, line.data) == (of.model, of.data)]
            lines[name] = max(found, key=lambda line: (line.tokens or 0, line.units or 0), default=None)
        if all(lines[name] or chosen.optional for name, chosen in sentence.lines.items()):
            yield template(sentence.say).render(known | lines)
        elif sentence.without:
            yield sentence.without
