"""The W&B workspaces and report as code: built without a server, written as JSON, pushed where there is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from focus_exp.errors import UserError
from focus_exp.reporting.figures import figure_names
from focus_exp.reporting.tables import table_specs
from focus_exp.storage import replace_file

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import Report
    from wandb_workspaces.workspaces import Section, Workspace

TITLE, REPORT = "focus_exp", "report"
# a section -> how the names of its tables begin; what begins otherwise is of quality
SECTIONS = {
    "Arms side by side": ("comparison", "benchmark_changes", "stability"),
    "Speed": ("speed",),
    "Groups": ("group", "section5", "distant_pairs", "cutting_cost"),
    "Quality": ("",),
}
CURVES = {
    "loss": "loss [nats per token]",
    "val_loss": "loss on held-out text",
    "tokens_per_second": "tokens a second",
}
PROBES = {
    "dominance": "share of the largest group",
    "dead_groups": "groups with under 1 % of the tokens",
    "stability": "tokens that kept their group",
}
COLUMNS = ("trainable_parameters", "tokens_seen", "train_seconds", "peak_memory_bytes", "commit")


def need_library() -> None:
    """UserError where the extra is not installed."""
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise UserError("job=dashboard needs wandb-workspaces: pip install 'focus_exp[dashboard]'") from error


def by_section(tables: Iterable[str]) -> dict[str, list[str]]:
    """Every table in the first section that takes its name."""
    found: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for name in tables:
        found[next(section for section, heads in SECTIONS.items() if name.startswith(heads))].append(name)
    return found


def workspaces(entity: str, project: str) -> dict[str, Workspace]:
    """Every run by experiment, and comparisons alone; the filters go by what `init_options` gives each run."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser

    newest = [ws.Ordering(ws.Metric("CreatedTimestamp"), ascending=False)]
    columns = [f"summary:{name}" for name in COLUMNS]
    every = ws.RunsetSettings(groupby=[ws.Metric("Group")], order=newest, pinned_columns=columns)
    compared = ws.RunsetSettings(filters=[ws.Metric("JobType") == "compare"], order=newest)
    curves = [LinePlot(title=title, y=[f"train/{key}"]) for key, title in CURVES.items()]
    # one plot a quantity, the phases of a run one after the other
    probes = [
        LinePlot(title=f"{name}: {title}", y=[f"probe/{name}"], metric_regex=rf"probe/.*{name}$")
        for name, title in PROBES.items()
    ]
    arms, *others = (
        ws.Section(name=name, panels=_panels(tables, height=12), is_open=True)
        for name, tables in by_section(table_specs()).items()
    )
    images = [MediaBrowser(media_keys=[f"figures/{name}"], num_columns=2) for name in figure_names()]
    training = ws.Section(name="Training", panels=[*curves], is_open=True, pinned=True)
    routing = ws.Section(name="Routing", panels=[*probes], is_open=True)
    figures = ws.Section(name="Figures", panels=[*images])

    def view(name: str, sections: list[Section], runs: Any) -> Workspace:
        settings = ws.WorkspaceSettings(max_runs=20)
        title = f"{TITLE}: {name}"
        return ws.Workspace(entity, project, title, sections=sections, settings=settings, runset_settings=runs)

    return {
        "runs": view("runs by experiment", [training, routing, *others, figures], every),
        "comparisons": view("comparisons", [arms, *others[-1:], figures], compared),
    }


def _panels(tables: Iterable[str], height: int) -> list[Any]:
    from wandb_workspaces.reports.v2 import Layout, WeavePanelSummaryTable

    return [WeavePanelSummaryTable(table_name=name, layout=Layout(w=24, h=height)) for name in tables]


def report(entity: str, project: str, experiments: dict[str, list[str]], tables: list[str]) -> Report:
    """The ledger and the paper's tables from the latest run of job=dashboard, then a grid of each experiment's tables.

    experiments: name -> the names of the tables that its runs log.
    """
    from wandb_workspaces.reports import v2 as wr

    published = wr.Runset(entity, project, name=REPORT, filters=f"JobType == '{REPORT}'")
    figure: list[Any] = [wr.MediaBrowser(media_keys=["figures/figure1"])]
    blocks: list[Any] = [
        wr.TableOfContents(),
        wr.H1("Claims and the paper's tables"),
        wr.PanelGrid(runsets=[published], panels=_panels(tables, height=10)),
        wr.H1("Figure 1"),
        wr.PanelGrid(runsets=[published], panels=figure),
    ]
    for experiment, names in experiments.items():
        runs = wr.Runset(entity, project, name=experiment, filters=f"Group == '{experiment}'")
        blocks += [wr.H1(experiment), wr.PanelGrid(runsets=[runs], panels=_panels(names, height=10))]
    description = "Learned sparse attention: what was measured, beside what the paper prints"
    return wr.Report(project=project, entity=entity, title=TITLE, description=description, blocks=blocks, width="fluid")


def write_specs(folder: Path, views: dict[str, Workspace], written: Report) -> list[Path]:
    """The JSON that the server would be sent, one file a view, and the report; no server is asked."""
    parts: dict[str, Any] = {**{f"workspace_{name}": view for name, view in views.items()}, "report": written}
    with without_server():
        texts = {name: part._to_model().model_dump_json(by_alias=True) for name, part in parts.items()}
    for name, text in texts.items():
        replace_file(folder / f"{name}.json", text.encode())
    return [folder / f"{name}.json" for name in texts]


@contextmanager
def without_server() -> Iterator[None]:
    """Within the block the library takes a stand-in for the project's id on the server, which it else asks for."""
    answer = {"project": {"internalId": "offline"}}
    interface = "wandb_workspaces.reports.v2.interface"
    with patch(f"{interface}._get_api", lambda: None), patch(f"{interface}.execute_graphql", lambda *_, **__: answer):
        yield


def push(views: dict[str, Workspace], written: Report) -> list[str]:
    """Save all of it on the server; returns the addresses."""
    return [saved.url for saved in [*(view.save() for view in views.values()), written.save()]]
