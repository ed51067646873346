"""The page that lists all runs below a folder, newest first; it opens from disk and sorts by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from focus_exp.errors import UserError
from focus_exp.records.answers import answer, configured_row
from focus_exp.records.comparison import RECORD, load_run
from focus_exp.records.record import Record
from focus_exp.reporting.formats import ABSENT, change_text, duration_text, perplexity_text, share_text
from focus_exp.reporting.gather import is_quick
from focus_exp.reporting.notes import where
from focus_exp.reporting.report import all_findings
from focus_exp.reporting.run_page import PAGE, REFRESH, link, page_style, write_run_page
from focus_exp.reporting.specs import render
from focus_exp.results.run_dir import State, state_of
from focus_exp.storage import held, replace_file

COLUMNS = ("state", "begun", "run", "of what", "perplexity", "base", "change [95 %]", "pairs kept", "took", "found")
REPORTS = {"the report": "report/report.html", "committed records": "records/report/report.html"}
PUBLISHED = "records"  # has a report of its own


@dataclass(frozen=True)
class Cell:
    """What a line of the list shows in a column, and what it is sorted by."""

    text: str
    key: float | str | None = None


@dataclass(frozen=True)
class Line:
    """A run. page: what it is linked to; arm: whether a comparison in the list holds it."""

    page: Path
    state: State
    cells: list[Cell]
    arm: bool = False


def write_index(top: Path) -> Path:
    """Write the list of the runs below `top`, but for the committed ones; returns the page."""
    page = top / PAGE
    with held(top / f".{PAGE}.lock", str(page), wait=True):  # the last to write has read all that others wrote before
        replace_file(page, index(top).encode())
    return page


def index(top: Path) -> str:
    """The text of the page."""
    found = [(path.parent, *read(path, path.stat().st_mtime_ns)) for path in records_below(top)]
    compared = {folder.parent.parent for folder, record, _ in found if record and record.arms}
    lines = [line_of(folder, record, problem, top, compared) for folder, record, problem in found]
    lines.sort(key=lambda line: str(line.cells[0].key), reverse=True)
    return render(
        "runs.html",
        heading="focus_exp: runs",
        style=page_style(),
        refresh=REFRESH if any(line.state.name == "running" for line in lines) else None,
        columns=COLUMNS,
        lines=lines,
        reports={name: path for name, path in REPORTS.items() if (top / path).exists()},
        link=partial(link, folder=top),
    )


def records_below(top: Path) -> list[Path]:
    return [path for path in top.rglob(RECORD) if path.relative_to(top).parts[0] != PUBLISHED]


def write_pages(top: Path) -> None:
    """The list, and the page of every run in it that has ended, such as one that was killed."""
    for path in records_below(top):
        record, _ = read(path, path.stat().st_mtime_ns)
        if record and state_of(record, path.parent).name != "running":
            write_run_page(record, path.parent, top)
    write_index(top)


@cache
def read(path: Path, changed: int) -> tuple[Record | None, str]:
    """The record that was `changed` then, or why there is none."""
    try:
        return load_run(path.parent), ""
    except UserError as error:
        return None, str(error)


def line_of(folder: Path, record: Record | None, problem: str, top: Path, compared: set[Path]) -> Line:
    name = folder.relative_to(top).as_posix()
    if record is None:
        blank = [Cell(ABSENT)] * (len(COLUMNS) - 4)
        return Line(folder / RECORD, State("broken", problem), [Cell(ABSENT), Cell(name, name), *blank, Cell(problem)])
    page, state = folder / PAGE, state_of(record, folder)
    begun = Cell(record.started[:16].replace("T", " "), record.started)
    said = state.reason or ("" if configured_row(record) else next(iter(all_findings(record)), ""))
    said = "at scale=quick: decides nothing" if is_quick(record) and not state.reason else said
    arm = bool(record.config.get("arm")) and folder.parent.parent in compared
    took = Cell(duration_text(record.wall_seconds), record.wall_seconds)
    cells = [begun, Cell(name, name), Cell(where(record)), *numbers(record), took, Cell(said)]
    return Line(page if page.exists() else folder / RECORD, state, cells, arm)


def numbers(record: Record) -> list[Cell]:
    """Of the row that stands for the run, in a comparison of the first arm's: what it costs, and what it keeps."""
    row, base = configured_row(record) or answer(record), record.base
    if row is None or not row.scored:
        return [Cell(ABSENT), _perplexity(base), Cell(ABSENT), Cell(ABSENT)]
    kept = None if row.pairs_removed is None else 1 - row.pairs_removed
    change = Cell(change_text(row.delta_nll, row.delta_low, row.delta_high), row.delta_nll)
    return [_perplexity(row), _perplexity(base), change, Cell(share_text(kept), kept)]


def _perplexity(row: Any) -> Cell:
    value = row.perplexity if row else None
    return Cell(perplexity_text(value), value)
