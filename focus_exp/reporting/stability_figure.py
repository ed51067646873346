"""Picture of the probes: the largest group and the dead groups over the steps, phase after phase, one line an arm."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from focus_exp.records.record import Record
from focus_exp.records.rows import ProbeRow
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.tables import title

STYLES = ("-", "--", ":")


def write_stability_figure(record: Record, folder: str | Path) -> dict[str, Path]:
    """Write stability.png into `folder` where there are probes; returns name -> path."""
    if not record.probes:
        return {}
    arms = list(dict.fromkeys(probe.arm for probe in record.probes))
    starts, end = phase_starts(record.probes)
    heading = f"{title(record)}\ngroups of held-out tokens while routers are trained, mean over layers"
    figure, panels = canvas(heading, height=6.4 + 0.12 * len(arms), nrows=2, sharex=True)
    styles = cycle((colour, style) for style in STYLES for colour in COLOURS)
    for arm, (colour, style) in zip(arms, styles, strict=False):
        found = [probe for probe in record.probes if probe.arm == arm]
        steps = [starts[probe.phase] + probe.step for probe in found]
        line = {"linestyle": style, "color": colour, "linewidth": 1.6}
        panels[0].plot(steps, [100 * probe.dominance for probe in found], label=arm, **line)
        panels[1].plot(steps, [probe.dead_groups for probe in found], **line)
    panels[0].set(ylabel="largest group [% of tokens]", ylim=(0, 102))
    panels[1].set(ylabel="dead groups (under 1 % of tokens)", xlabel="optimiser step")
    panels[1].set_ylim(bottom=-0.1)
    panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels:
        _mark_phases(axes, starts, end, named=axes is panels[0])
    if arms != [None]:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return save_figures({"stability": figure}, folder)


def phase_starts(probes: list[ProbeRow]) -> tuple[dict[str, int], int]:
    """The step at which each phase starts if one follows the other, and the last of all."""
    lengths: dict[str, int] = {}
    for probe in probes:
        lengths[probe.phase] = max(lengths.get(probe.phase, 0), probe.step)
    starts, end = {}, 0
    for phase, length in lengths.items():
        starts[phase] = end
        end += length
    return starts, end


def _mark_phases(axes: Axes, starts: dict[str, int], end: int, *, named: bool) -> None:
    for phase, start in starts.items():
        if start:
            axes.axvline(start, color="grey", linestyle="--", linewidth=1)
        if named and len(starts) > 1:
            axes.text(start + 0.01 * end, 1.0, phase, color="grey", va="bottom", transform=axes.get_xaxis_transform())
