"""job=reproduce."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from focus_exp.attention.options import did_you_mean
from focus_exp.cli import quote_override, quote_text
from focus_exp.config import Config
from focus_exp.errors import Interrupted, UserError
from focus_exp.jobs.compose import (
    compose_adapter,
    compose_overrides,
    compose_variant,
    shared_overrides,
    variant_name,
)
from focus_exp.jobs.report import report
from focus_exp.jobs.resume import finished_record
from focus_exp.jobs.run import format_seconds
from focus_exp.reporting.load import QUICK
from focus_exp.reporting.publish import publish
from focus_exp.results.environment import commit, unknown_commit_reason
from focus_exp.results.run_dir import run_folder

TABLE_REFERENCE = re.compile(r"(?<!\w)@(\w+)(?:\.(\w+))?")  # @table or @table.variant, but not perplexity@1024
TIMED_BUDGET = "embedded"  # the budget that reproduce.minutes were measured at


def reproduce(config: Config) -> None:
    """Run the command of every table in turn, then write the report. Re-run the same command to resume.

    Failed tables are named at the end. budget=quick only shows that all of it runs; budget=paper uses the paper's
    models, data and steps, from the Hub; reproduce=seeds adds two seeds of tables that have one.
    reproduce.publish=true copies finished runs to runs/records, replacing those they supersede, and writes the
    report there.
    """
    settings, budget = config.reproduce, config.budget["name"]
    if settings.publish and budget == QUICK:
        raise UserError(f"reproduce.publish must be false with budget={QUICK} (got true): it measures nothing.")
    if settings.publish and (reason := unknown_commit_reason(commit())):
        raise UserError(f"reproduce.publish must be false while the code is {reason} (got true). Commit it first.")
    if missing := next((name for name in settings.only if name not in settings.tables), None):
        raise UserError(f"reproduce.only must be tables (got {missing}){did_you_mean(missing, list(settings.tables))}")
    tables = {name: table for name, table in settings.tables.items() if not settings.only or name in settings.only}
    commands = {name: table_overrides(table, config) for name, table in tables.items()}
    minutes = {name: settings.minutes.get(name, 1.0) for name in tables if not is_finished(commands[name])}
    pace = 1.0 if budget == TIMED_BUDGET else None
    finished = len(tables) - len(minutes)
    print(
        f"reproduce {settings.name} at budget={budget}: {len(tables)} tables, {finished} already finished"
        + estimate(minutes, pace)
    )
    taken: dict[str, float] = {}
    failed = []
    for number, (name, overrides) in enumerate(commands.items(), start=1):
        if name not in minutes:
            continue
        if taken:
            pace = sum(taken.values()) / sum(minutes[other] for other in taken)
        left = {other: value for other, value in minutes.items() if other not in taken}
        print(f"\n[{number}/{len(tables)}] {name}{estimate(left, pace)}")
        print(f"python -m focus_exp {shlex.join(overrides)}")
        start = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", "focus_exp", *overrides]).returncode
        taken[name] = (time.perf_counter() - start) / 60
        if code > 128 or code < 0:
            raise Interrupted(abs(code) % 128, f"in table {name}")
        if code:
            failed.append(name)
        print(f"[{number}/{len(tables)}] {name}: {'failed' if code else 'done'} in {format_seconds(taken[name] * 60)}")
    if settings.publish:
        publish_records(config, commands)
    report(config)
    if failed:
        raise UserError(f"tables failed: {', '.join(failed)} ({len(failed)} of {len(tables)}). Re-run to resume.")


def table_overrides(table: list[str], config: Config) -> list[str]:
    """Return a table's command line with this budget and these folders; @table becomes its adapter."""

    def find_adapter(match: re.Match[str]) -> str:
        name, variant = match.groups()
        if name not in config.reproduce.tables:
            raise UserError(f"reproduce.tables must have {name}, whose adapter {match[0]} is used.")
        overrides = table_overrides(config.reproduce.tables[name], config)
        run = compose_overrides(overrides)
        if variant is not None and variant not in map(variant_name, run.variants):
            raise UserError(f"reproduce.tables.{name} must have variant {variant}, whose adapter {match[0]} is used.")
        folder = run_folder(run if variant is None else compose_variant(run, variant, overrides))
        return quote_text(f"{folder}/adapter")

    cache = [f"cache_dir={config.cache_dir}"] if config.cache_dir else []
    overrides = [TABLE_REFERENCE.sub(find_adapter, override) for override in table]
    return [quote_override(override) for override in [*overrides, *shared_overrides(config), *cache]]


def compose_runs(overrides: list[str]) -> Iterator[Config]:
    """Yield the runs of a command: its own, and those of a comparison's variants.

    Raises:
        UserError: while the adapter that it needs does not exist yet.
    """
    config = compose_overrides(overrides)
    yield compose_adapter(config, overrides) if config.adapter and config.job != "compare" else config
    for name in map(variant_name, config.variants):
        yield compose_variant(config, name, overrides)


def is_finished(overrides: list[str]) -> bool:
    with suppress(UserError):
        return all(finished_record(run) for run in compose_runs(overrides))
    return False


def publish_records(config: Config, commands: dict[str, list[str]]) -> None:
    """Copy the finished runs of `commands` to runs_dir/records, and remove those that no table has any more."""
    runs, records = Path(config.runs_dir), Path(config.runs_dir) / "records"
    current: set[Path] = set()
    published: list[Path] = []
    for name, table in config.reproduce.tables.items():
        with suppress(UserError):
            configs = list(compose_runs(table_overrides(table, config)))
            current |= {run_folder(run).relative_to(runs) for run in configs}
            if name in commands:
                published += [run_folder(run).relative_to(runs) for run in configs if finished_record(run)]
    removed = publish(published, current, runs, records)
    for folder in removed:
        print(f"removed, superseded: {folder}")
    for folder in published:
        print(records / folder)
    print(f"{len(published)} runs published below {records}, {len(removed)} superseded ones removed")


def estimate(minutes: dict[str, float], pace: float | None) -> str:
    """Return the time left at a pace relative to reproduce.minutes, "" if it is unknown."""
    return f", about {format_seconds(60 * pace * sum(minutes.values()))} left" if minutes and pace else ""
