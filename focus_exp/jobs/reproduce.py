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

from hydra import compose

from focus_exp.attention.options import did_you_mean
from focus_exp.checks import parse
from focus_exp.cli import quote_override, quote_text
from focus_exp.config import Config
from focus_exp.errors import Interrupted, UserError
from focus_exp.jobs.adapter import with_adapter
from focus_exp.jobs.report import report
from focus_exp.jobs.run import finished_record, run_folder, seconds_text
from focus_exp.jobs.variants import compose_variant, variant_name
from focus_exp.reporting.load import QUICK
from focus_exp.reporting.publish import publish
from focus_exp.results.environment import commit, unknown_commit_reason

OF_TABLE = re.compile(r"(?<!\w)@(\w+)(?:\.(\w+))?")  # a table, or an arm of it, not perplexity@1024
TIMED = "embedded"  # the scale whose minutes the configuration says


def reproduce(config: Config) -> None:
    """Run the command of every table in turn, then write the report. Re-run the same command to resume.

    Failed tables are named at the end. budget=quick only shows that all of it runs; budget=paper uses the paper's
    models, data and steps, from the Hub; reproduce=seeds adds two seeds of tables that have one.
    reproduce.publish=true copies finished runs to runs/records, replacing those they supersede, and writes the
    report there.
    """
    if config.reproduce.publish and config.budget.name == QUICK:
        raise UserError(
            f"reproduce.publish keeps measurements, and budget={QUICK} makes none; leave one of the two out"
        )
    if config.reproduce.publish and (why := unknown_commit_reason(commit())):
        raise UserError(
            f"reproduce.publish=true keeps records that anybody can repeat, and this code is {why}; commit it"
        )
    listed, only = config.reproduce.tables, config.reproduce.only
    if missing := next((name for name in only if name not in listed), None):
        nearest = did_you_mean(missing, list(listed))
        raise UserError(
            f"reproduce={config.reproduce.name} has no table {missing}, which reproduce.only holds{nearest}"
        )
    tables = {name: table for name, table in listed.items() if not only or name in only}
    commands = {name: overrides_of(table, config) for name, table in tables.items()}
    minutes = {name: config.reproduce.minutes.get(name, 1.0) for name in tables if not finished(commands[name])}
    known = 1.0 if config.budget.name == TIMED else None
    print(
        f"reproduce {config.reproduce.name} at budget={config.budget.name}: {len(tables)} tables, "
        f"{len(tables) - len(minutes)} finished already" + estimate(minutes, known)
    )
    taken: dict[str, float] = {}
    failed = []
    for number, (name, overrides) in enumerate(commands.items(), start=1):
        if name not in minutes:
            continue
        left = {other: m for other, m in minutes.items() if other not in taken}
        pace = sum(taken.values()) / sum(minutes[other] for other in taken) if taken else known
        print(f"\n[{number}/{len(tables)}] {name}{estimate(left, pace)}")
        print(f"python -m focus_exp {shlex.join(overrides)}")
        began = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", "focus_exp", *overrides]).returncode
        taken[name] = (time.perf_counter() - began) / 60
        if code > 128 or code < 0:
            raise Interrupted(abs(code) % 128, f"in table {name}")
        if code:
            failed.append(name)
        print(f"[{number}/{len(tables)}] {name}: {'failed' if code else 'done'} in {seconds_text(taken[name] * 60)}")
    if config.reproduce.publish:
        publish_records(config, commands)
    report(config)
    if failed:
        raise UserError(f"{len(failed)} of {len(tables)} tables failed: {', '.join(failed)}; the same command goes on")


def overrides_of(table: list[str], config: Config) -> list[str]:
    """The table's command line at this scale, in these folders, with the adapters of other tables in their place."""
    shared = [
        f"budget={config.budget.name}",
        f"assets={config.assets}",
        f"runs_dir={config.runs_dir}",
        *([f"cache_dir={config.cache_dir}"] if config.cache_dir else []),
        f"logger.wandb={config.logger.wandb}",
    ]

    def adapter(found: re.Match[str]) -> str:
        table, arm = found.groups()
        if table not in config.reproduce.tables:
            raise UserError(f"reproduce.tables has no table {table}, whose adapter {found[0]} asks for")
        overrides = overrides_of(config.reproduce.tables[table], config)
        made = composed(overrides)
        if arm is not None and arm not in map(variant_name, made.variants):
            raise UserError(f"table {table} has no variant {arm}, whose adapter {found[0]} asks for")
        folder = run_folder(made if arm is None else compose_variant(made, arm, overrides))
        return quote_text(f"{folder}/adapter")

    return [quote_override(override) for override in [*(OF_TABLE.sub(adapter, one) for one in table), *shared]]


def composed(overrides: list[str]) -> Config:
    return parse(compose("config", overrides))


def made_by(overrides: list[str]) -> Iterator[Config]:
    """The runs of this command: its own and, of a comparison, every arm's as it would be run now.

    UserError while the adapter that it needs is still to be made.
    """
    config = composed(overrides)
    # a comparison goes by its own settings, whatever the adapter that its arms measure
    yield with_adapter(config, overrides) if config.adapter and config.job != "compare" else config
    for name in map(variant_name, config.variants):
        yield compose_variant(config, name, overrides)


def finished(overrides: list[str]) -> bool:
    """Whether all runs that this command makes are there."""
    with suppress(UserError):
        return all(finished_record(run) for run in made_by(overrides))
    return False


def publish_records(config: Config, commands: dict[str, list[str]]) -> None:
    """Copy the finished runs of `commands` to runs_dir/records, where those that no table makes any more go."""
    runs, records = Path(config.runs_dir), Path(config.runs_dir) / "records"
    current: set[Path] = set()
    published: list[Path] = []
    for name, table in config.reproduce.tables.items():
        with suppress(UserError):
            made = list(made_by(overrides_of(table, config)))
            current |= {run_folder(run).relative_to(runs) for run in made}
            if name in commands:
                published += [run_folder(run).relative_to(runs) for run in made if finished_record(run)]
    removed = publish(published, current, runs, records)
    for folder in removed:
        print(f"removed, superseded: {folder}")
    for place in published:
        print(records / place)
    print(f"{len(published)} runs published below {records}, {len(removed)} superseded ones removed")


def estimate(minutes: dict[str, float], pace: float | None) -> str:
    """What is left by the minutes of the configuration at this pace; "" while it is unknown."""
    if not minutes or pace is None:
        return ""
    return f", about {seconds_text(60 * pace * sum(minutes.values()))} left"
