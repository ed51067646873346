"""The W&B workspaces and report as code: built without a server, written as JSON, pushed where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from focus_exp.errors import UserError
from focus_exp.storage import replace_file

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import Report
    from wandb_workspaces.workspaces import Section, Workspace

TITLE = "focus_exp"
PROBES = {"dominance": "share of the largest group", "dead_groups": "groups with under 1 % of the tokens",
          "stability": "tokens that kept their group"}  # fmt: skip
# tables as runs log them: those of one run, of a comparison, of a benchmark by the clock, of job=dashboard
QUALITY, COMPARISON = ("quality", "benchmarks"), ("comparison", "benchmark_changes", "benchmarks")
SPEED = ("speed_attention", "speed_prefill", "speed_top_k", "speed_decode")
REPORT = "report"
FIGURES = ("loss_curve", "training", "perplexity_by_position", "group_sizes", "comparison", "speed", "speed_quality")
COLUMNS = ("trainable_parameters", "tokens_seen", "train_seconds", "peak_memory_bytes", "commit")


def need_library() -> None:
    """UserError where the extra is not installed."""
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise UserError("job=dashboard needs wandb-workspaces: pip install 'focus_exp[dashboard]'") from error


def workspaces(entity: str, project: str) -> dict[str, Workspace]:
    """Every run by experiment, and comparisons alone; the filters go by what `init_options` gives each run."""
    from wandb_workspaces import workspaces as ws

    columns = [f"summary:{name}" for name in COLUMNS]
    newest = [ws.Ordering(ws.Metric("CreatedTimestamp"), ascending=False)]
    every = ws.RunsetSettings(groupby=[ws.Metric("Group")], order=newest, pinned_columns=columns)
    compared = ws.RunsetSettings(filters=[ws.Metric("JobType") == "compare"], order=newest)
    parts = [_training(), _routing(), _tables("Quality", QUALITY), _figures()]
    beside = [_tables("Arms side by side", COMPARISON), _figures()]
    return {
        "runs": _workspace(entity, project, "runs by experiment", parts, every),
        "comparisons": _workspace(entity, project, "comparisons", beside, compared),
    }


def _workspace(entity: str, project: str, name: str, sections: list[Section], runs: Any) -> Workspace:
    from wandb_workspaces import workspaces as ws

    return ws.Workspace(
        entity=entity, project=project, name=f"{TITLE}: {name}", sections=sections, runset_settings=runs,
        settings=ws.WorkspaceSettings(max_runs=20),
    )  # fmt: skip


def _training() -> Section:
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot

    lines = {
        "loss": "loss [nats per token]",
        "val_loss": "loss on held-out text",
        "tokens_per_second": "tokens a second",
    }
    panels: list[Any] = [LinePlot(title=title, y=[f"train/{key}"]) for key, title in lines.items()]
    return ws.Section(name="Training", panels=panels, is_open=True, pinned=True)


def _routing() -> Section:
    """The probes of routers while they are trained: one plot a quantity, the phases of a run one after the other."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot

    panels: list[Any] = [
        LinePlot(title=f"{name}: {title}", y=[f"probe/{name}"], metric_regex=rf"probe/.*{name}$")
        for name, title in PROBES.items()
    ]
    return ws.Section(name="Routing", panels=panels, is_open=True)


def _tables(name: str, tables: tuple[str, ...]) -> Section:
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import Layout, WeavePanelSummaryTable

    layout = Layout(w=24, h=12)
    return ws.Section(
        name=name, panels=[WeavePanelSummaryTable(table_name=table, layout=layout) for table in tables], is_open=True
    )


def _figures() -> Section:
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import MediaBrowser

    return ws.Section(
        name="Figures", panels=[MediaBrowser(media_keys=[f"figures/{key}"], num_columns=2) for key in FIGURES]
    )


def report(entity: str, project: str, experiments: list[str], tables: list[str]) -> Report:
    """The ledger and the paper's tables from the latest run of job=dashboard, then a grid for every experiment."""
    from wandb_workspaces.reports import v2 as wr

    published = wr.Runset(entity, project, name=REPORT, filters="JobType == 'report'")
    blocks: list[Any] = [
        wr.TableOfContents(),
        wr.H1("Claims and the paper's tables"),
        _grid([published], tables),
        wr.H1("Figure 1"),
        wr.PanelGrid(runsets=[published], panels=[wr.MediaBrowser(media_keys=["figures/figure1"])]),
    ]
    for experiment in experiments:
        runs = wr.Runset(entity, project, name=experiment, filters=f"Group == '{experiment}'")
        blocks += [wr.H1(experiment), _grid([runs], [*COMPARISON, QUALITY[0], *SPEED])]
    description = "Learned sparse attention: what was measured, beside what the paper prints"
    return wr.Report(project=project, entity=entity, title=TITLE, description=description, blocks=blocks, width="fluid")


def _grid(runsets: list[Any], tables: list[str]) -> Any:
    from wandb_workspaces.reports import v2 as wr

    panels: list[Any] = [wr.WeavePanelSummaryTable(table_name=name, layout=wr.Layout(w=24, h=10)) for name in tables]
    return wr.PanelGrid(runsets=runsets, panels=panels)


def write_specs(folder: Path, views: dict[str, Workspace], written: Report) -> list[Path]:
    """The JSON that the server would be sent, one file a view, and the report; no server is asked."""
    paths = []
    with without_server():
        texts = {f"workspace_{name}": view._to_model().model_dump_json(by_alias=True) for name, view in views.items()}
        texts["report"] = written._to_model().model_dump_json(by_alias=True)
    for name, text in texts.items():
        paths.append(folder / f"{name}.json")
        replace_file(paths[-1], text.encode())
    return paths


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
