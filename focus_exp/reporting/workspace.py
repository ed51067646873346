"""The W&B workspaces and report of workspace.yaml: built without a server, written as JSON, pushed where there is one.

wandb_workspaces, which is an extra, is imported late.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from focus_exp.errors import UserError
from focus_exp.reporting.figures import figure_names
from focus_exp.reporting.specs import read_yaml
from focus_exp.reporting.tables import table_specs
from focus_exp.storage import replace_file

REPORT = "report"


def need_library() -> None:
    """UserError where the extra is not installed."""
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise UserError("job=dashboard needs wandb-workspaces: pip install 'focus_exp[dashboard]'") from error


def by_section(tables: Iterable[str]) -> dict[str, list[str]]:
    """Every table in the first section that takes its name."""
    sections = read_yaml("workspace")["tables"]
    found: dict[str, list[str]] = {section: [] for section in sections}
    for name in tables:
        found[next(section for section, heads in sections.items() if name.startswith(tuple(heads)))].append(name)
    return found


def workspaces(entity: str, project: str) -> dict[str, Any]:
    """Every view by its name."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser

    layout = read_yaml("workspace")
    panels = {
        "Training": [LinePlot(title=title, y=[f"train/{key}"]) for key, title in layout["curves"].items()],
        # one plot a quantity, the phases of a run one after the other
        "Routing": [
            LinePlot(title=f"{name}: {title}", y=[f"probe/{name}"], metric_regex=rf"probe/.*{name}$")
            for name, title in layout["probes"].items()
        ],
        **{section: _panels(tables, height=12) for section, tables in by_section(table_specs()).items()},
        "Figures": [MediaBrowser(media_keys=[f"figures/{name}"], num_columns=2) for name in figure_names()],
    }

    def view(title: str, sections: list[str], groupby: Any = (), columns: Any = (), filters: Any = None) -> Any:
        runs = ws.RunsetSettings(
            groupby=[ws.Metric(name) for name in groupby],
            filters=[ws.Metric(name) == value for name, value in (filters or {}).items()],
            order=[ws.Ordering(ws.Metric("CreatedTimestamp"), ascending=False)],
            pinned_columns=[f"summary:{name}" for name in columns],
        )
        shown = [
            ws.Section(name=name, panels=panels[name], is_open=name != "Figures", pinned=name == "Training")
            for name in sections
        ]
        settings, name = ws.WorkspaceSettings(max_runs=20), f"{layout['title']}: {title}"
        return ws.Workspace(entity, project, name, sections=shown, settings=settings, runset_settings=runs)

    return {name: view(**spec) for name, spec in layout["views"].items()}


def _panels(tables: Iterable[str], height: int) -> list[Any]:
    from wandb_workspaces.reports.v2 import Layout, WeavePanelSummaryTable

    return [WeavePanelSummaryTable(table_name=name, layout=Layout(w=24, h=height)) for name in tables]


def report(entity: str, project: str, experiments: dict[str, list[str]], tables: list[str]) -> Any:
    """The ledger and the paper's tables from the latest run of job=dashboard, then a grid of each experiment's tables.

    experiments: name -> the names of the tables that its runs log.
    """
    from wandb_workspaces.reports import v2 as wr

    def part(heading: str, panels: list[Any], name: str, filters: str) -> list[Any]:
        runs = wr.Runset(entity, project, name=name, filters=filters)
        return [wr.H1(heading), wr.PanelGrid(runsets=[runs], panels=panels)]

    published = REPORT, f"JobType == '{REPORT}'"
    blocks: list[Any] = [
        wr.TableOfContents(),
        *part("Claims and the paper's tables", _panels(tables, height=10), *published),
        *part("Figure 1", [wr.MediaBrowser(media_keys=["figures/figure1"])], *published),
    ]
    for experiment, names in experiments.items():
        blocks += part(experiment, _panels(names, height=10), experiment, f"Group == '{experiment}'")
    told = {key: read_yaml("workspace")[key] for key in ("title", "description")}
    return wr.Report(project=project, entity=entity, blocks=blocks, width="fluid", **told)


def write_specs(folder: Path, views: dict[str, Any], written: Any) -> list[Path]:
    """The JSON that the server would be sent, one file a view, and the report; no server is asked."""
    parts = {**{f"workspace_{name}": view for name, view in views.items()}, "report": written}
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


def push(views: dict[str, Any], written: Any) -> list[str]:
    """Save all of it on the server; returns the addresses."""
    return [saved.url for saved in [*(view.save() for view in views.values()), written.save()]]
