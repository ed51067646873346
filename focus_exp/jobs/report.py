"""job=report and job=dashboard."""

from __future__ import annotations

from pathlib import Path

from focus_exp.config import Config
from focus_exp.reporting.figures import report_figures
from focus_exp.reporting.load import load_results
from focus_exp.reporting.pages import fill_pages
from focus_exp.reporting.report import REPORT, report_tables, verdict_table, write_report
from focus_exp.reporting.wandb import build_workspace, dashboard_tables, log_tables, wandb_mode
from focus_exp.results.runs import RUNS, collect_runs
from focus_exp.runs.open import open_wandb
from focus_exp.storage import replace_file

NAME = "report"  # of the W&B run of job=dashboard


def report(config: Config) -> None:
    """Write the report of all runs below runs_dir, with a verdict on every claim of the paper.

    That of runs/records also fills in the numbers of README.md and docs/results.md, between their markers.
    report.collect=<folder> first adds the runs in folders below it to the tables of runs_dir (see results/runs.py).
    """
    runs = Path(config.runs_dir)
    if config.report.collect:
        added = collect_runs(Path(config.report.collect), runs)
        print(f"{len(added)} runs of {config.report.collect} are in {runs / RUNS}")
    results = load_results(runs, config.budget["name"])
    tables = report_tables(results)
    write_report(results, tables, runs / REPORT)
    for page, text in fill_pages(runs, tables).items():
        replace_file(page, text.encode())
    print(verdict_table(tables["claims"]).to_string(index=False))
    print(f"report: {runs / REPORT / 'report.md'}")


def dashboard(config: Config) -> None:
    """Log the report's tables and figures as a W&B run, and save a workspace that shows them.

    The workspace has the claims, the paper's tables and the frontier, then curves and tables of all runs. Offline it is
    not saved; the tables are JSON files of the W&B run. Needs make install-dashboard.
    """
    runs, entity, project = Path(config.runs_dir), config.logger.wandb_entity, config.logger.wandb_project
    mode = wandb_mode(config.logger.wandb)
    results = report_tables(load_results(runs, config.budget["name"]))
    tables, figures = dashboard_tables(results), report_figures(results)
    drawn = [name for name, figure in figures.items() if figure]
    workspace = build_workspace(entity or "", project, list(tables), drawn)
    live = open_wandb(config, mode, dir=runs, name=NAME, group=NAME, job_type=NAME)
    log_tables(live, tables, figures)
    if mode == "online" and not live.offline:
        workspace.entity = live.entity
        print(f"saved {workspace.save().url}")
    else:
        print(f"the workspace is not saved with logger.wandb={mode}. Run wandb login.")
    live.finish()
    if live.offline:
        print(f"{len(tables)} tables: {Path(live.dir) / 'media' / 'table'}. wandb sync uploads them.")
