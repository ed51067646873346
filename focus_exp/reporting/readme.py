"""The README, every number of which is filled in from the committed records: python -m focus_exp.reporting.readme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from focus_exp.errors import UserError
from focus_exp.records.record import Record
from focus_exp.reporting.claims import judged_runs
from focus_exp.reporting.formats import VERDICTS, listed_text
from focus_exp.reporting.gather import Runs, gather
from focus_exp.reporting.measured import Line, lines_of
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.pages import relative
from focus_exp.reporting.paper import paper_row
from focus_exp.reporting.selection import select
from focus_exp.reporting.specs import render
from focus_exp.reporting.speed import break_even
from focus_exp.reporting.together import together
from focus_exp.storage import replace_file

PAGE = "README.md"
MARK = "<!-- made by `make readme` from focus_exp/reporting/templates/README.md.j2 -->"


def readme_of(records: Path) -> Path | None:
    """The README of the project that `records` are committed in, None where it is not made from them."""
    path = records.absolute().parent.parent / PAGE
    return path if path.exists() and path.read_text(encoding="utf-8").startswith(MARK) else None


def readme(records: Path) -> str:
    """The text of it. UserError where the records lack a number that it gives, or contradict a sentence of it."""
    runs = gather(records.absolute())
    table = select(measurements(runs), {"counts": True})

    def lines(**cells: Any) -> list[Line]:
        """The lines of the measurements with these cells, by their seeds; of arms those of their comparisons."""
        if found := sorted(lines_of(select(table, {"is_arm": False} | cells)), key=lambda line: line.seed):
            return found
        raise UserError(f"no finished record has a line with {cells}")

    def link(line: Line, file: str) -> str:
        return relative(Path(line.run) / file, records.absolute().parent.parent)

    try:
        return render(
            PAGE, mark=MARK, lines=lines, together=together, link=link, if_so=if_so, verdicts=verdicts(runs),
            record=lambda line: runs.named[line.run], steps_of_paper=steps_of_paper,
            break_even=lambda found: break_even([(line.tokens, line.value) for line in found]).tokens,
            paper_row=paper_row,
        )  # fmt: skip
    except (TemplateError, UserError) as error:
        raise UserError(f"{PAGE}.j2: {error}") from error


def if_so(sentence: str, holds: bool) -> str:
    """`sentence`, as long as the records say so."""
    if not holds:
        raise UserError(f"the records do not say any more that {sentence!r}; write anew what they say")
    return sentence


def verdicts(runs: Runs) -> str:
    """How many claims there are, and how many of them are what."""
    words = [verdict.word for _, verdict in judged_runs(runs)]
    counts = [f"{words.count(word)} {word}" for word in VERDICTS if word in words]
    return f"{len(words)} claims, judged here: {listed_text(counts)}"


def steps_of_paper(record: Record) -> int:
    """Optimiser steps that the paper takes with the model that the record asked for."""
    settings = dict(setting.split("=") for setting in record.setting("model", "paper"))
    return int(settings["regime.steps"])


def write_readme(records: Path) -> None:
    """Write it anew, if there is one."""
    if path := readme_of(records):
        replace_file(path, readme(records).encode())


if __name__ == "__main__":
    write_readme(Path("runs/records"))
