"""The page that shows a run, from its folder; while the run goes on it shows how far it is. It needs no network."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from focus_exp.records.comparison import RECORD, arm_folder, with_arms
from focus_exp.records.metrics import METRICS, read_metrics
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm
from focus_exp.reporting.canvas import save_figures
from focus_exp.reporting.curves import losses
from focus_exp.reporting.figures import draw, figure_specs
from focus_exp.reporting.formats import ABSENT, duration_text
from focus_exp.reporting.notes import caveats, command_of, title
from focus_exp.reporting.pages import marked, relative, split
from focus_exp.reporting.report import CONTINUATIONS, PASSAGE, all_findings, all_tables
from focus_exp.reporting.specs import render
from focus_exp.results.run_dir import NOT_ENDED, State, state_of
from focus_exp.storage import replace_file

PAGE = "index.html"
REFRESH = 10  # seconds after which a browser reads the page of a live run again
CURVE = "loss_curve"
READ = {PASSAGE: "a passage coloured by group", CONTINUATIONS: "continuations to read"}


def write_run_page(record: Record, folder: Path, top: Path, now: str | None = None) -> Path:
    """Write index.html into the run's `folder`, below `top` with the list of all runs; returns the page.

    now: what a run that goes on is at; None for one that has ended. Its training curve is drawn so far.
    """
    if record.status == "finished":
        record = with_arms(record, folder)
    elif lines := read_metrics(folder / METRICS):
        curve = draw(figure_specs()[CURVE], record, losses(record, lines))
        save_figures({CURVE: curve}, folder / "figures", ["svg"])
    page = folder / PAGE
    replace_file(page, run_page(record, folder, top, now).encode())
    return page


def run_page(record: Record, folder: Path, top: Path, now: str | None = None) -> str:
    """The text of the page."""
    live = now is not None
    measured = record.rows or record.is_timed or record.groups or record.continuations
    state = State("running", now or "") if live else state_of(record, folder)
    tables = all_tables(record) if measured else []
    return render(
        "run.html",
        heading=title(record),
        style=page_style(),
        refresh=REFRESH if live else None,
        written=now_text(),
        state=state,
        about=about(record),
        facts=facts_of(record),
        caveats=[] if tables else caveats(replace(record, status="finished")),
        findings=all_findings(record) if measured or record.counts else [],
        tables=tables,
        figures=sorted((folder / "figures").glob("*.svg")),
        arms=arms_table(record, folder),
        read={name: text for name, text in READ.items() if (folder / name).exists()},
        command=command_of(record).rpartition(", ")[0],
        record=record,
        files=sorted(path.name + "/" * path.is_dir() for path in folder.glob("[!.]*") if path.name != PAGE),
        all_runs=top / PAGE,
        marked=marked,
        split=split,
        link=partial(link, folder=folder),
    )


def page_style() -> str:
    """What the report looks like, and what runs have beside that."""
    return "".join(
        (files("focus_exp.reporting") / name).read_text(encoding="utf-8") for name in ("page.css", "run.css")
    )


def link(path: Path, folder: Path) -> str:
    """`path` as the address of a link in a page in `folder`, whatever its name is made of."""
    return quote(relative(path, folder))


def about(record: Record) -> str:
    """What the run is, in one line."""
    names = [record.setting(part, "name") for part in ("regime", "model", "attention", "data")]
    regime, model, attention, data = (name or ABSENT for name in names)
    job = record.config.get("job", ABSENT)
    what = f"{regime} of {model} with {attention}" if job == "train" else f"{job}: {model} with {attention}"
    arm = f"{record.config['arm']}: " if record.config.get("arm") else ""
    return f"{arm}{what} on {data}, seed {record.seed}; {record.device}"


def facts_of(record: Record) -> dict[str, str]:
    """What is known of the run beside what it found, empty facts left out."""
    known = {
        "begun": record.started,
        "took": duration_text(record.wall_seconds) if record.wall_seconds else "",
        "trained": f"{record.steps:,} steps, {record.tokens_seen:,} tokens" if record.steps else "",
        "memory": f"{record.peak_memory_bytes / 2**30:.1f} GiB at most" if record.peak_memory_bytes else "",
        "model": str(record.model.get("used", "")),
        "text": str(record.data.get("used", "")),
        "commit": record.commit or "outside of git",
        "configuration": record.config_hash,
        "machine": ", ".join(record.machine.values()),
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
    }
    return {name: fact for name, fact in known.items() if fact}


def arms_table(record: Record, folder: Path) -> list[dict[str, Any]]:
    """The arms of a comparison, each with its state and its page."""
    return [
        {"name": arm.name, "settings": " ".join(arm.settings), "state": arm_state(arm, place), "page": place / PAGE}
        for arm in record.arms
        for place in [arm_folder(folder, arm)]
    ]


def arm_state(arm: Arm, folder: Path) -> State:
    """As the comparison says; until it has ended, as the arm's own record says, if there is one."""
    if arm.error != NOT_ENDED:
        return State(arm.status, arm.error or "")
    path = folder / RECORD
    return state_of(Record.load(path), folder) if path.exists() else State("waiting")


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
