"""job=reproduce."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace

from focus_exp.attention.options import did_you_mean
from focus_exp.cli import quote
from focus_exp.config import Config
from focus_exp.errors import Interrupted, UserError
from focus_exp.jobs.report import report
from focus_exp.results.run_dir import run_folder
from focus_exp.runs.compose import compose_overrides, compose_variant, describe_budget, shared_overrides, variant_name

TABLE_REFERENCE = re.compile(r"(?<!\w)@(\w+)(?:\.(\w+))?")  # @table or @table.variant, but not perplexity@1024


def reproduce(config: Config) -> None:
    """Run the command of every table in turn, then write the report. Re-run the same command to resume.

    Failed tables are named at the end. budget=quick only shows that all of it runs; budget=paper makes the paper's
    tables on its models, data and steps, from the Hub; reproduce=seeds adds two seeds of tables that have one.
    """
    settings = config.reproduce
    if settings.assets and config.assets not in ("auto", settings.assets):
        raise UserError(
            f"assets must be {settings.assets} with reproduce={settings.name} (got {config.assets}). Type "
            "reproduce=paper for tables from the Hub."
        )
    config = replace(config, assets=settings.assets or config.assets)
    if missing := next((name for name in settings.only if name not in settings.tables), None):
        raise UserError(f"reproduce.only must be tables (got {missing}){did_you_mean(missing, list(settings.tables))}")
    tables = {name: table for name, table in settings.tables.items() if not settings.only or name in settings.only}
    commands = {name: table_overrides(table, config) for name, table in tables.items()}
    print(f"reproduce {settings.name}: {len(tables)} tables, assets={config.assets}, {describe_budget(config)}")
    failed = []
    for number, (name, overrides) in enumerate(commands.items(), start=1):
        print(f"\n[{number}/{len(tables)}] {name}\npython -m focus_exp {shlex.join(overrides)}")
        start = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", "focus_exp", *overrides]).returncode
        if code > 128 or code < 0:
            raise Interrupted(abs(code) % 128, f"in table {name}")
        if code:
            failed.append(name)
        minutes = (time.perf_counter() - start) / 60
        print(f"[{number}/{len(tables)}] {name}: {'failed' if code else 'done'} in {minutes:.1f} minutes")
    try:
        report(config)
    except UserError as error:  # such as no runs, where all tables failed
        if not failed:
            raise
        print(f"no report: {error}")
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
        return quote(f"{folder}/adapter")

    overrides = [TABLE_REFERENCE.sub(find_adapter, override) for override in table]
    return [*overrides, *shared_overrides(config)]
