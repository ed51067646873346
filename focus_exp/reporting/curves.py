"""What the figures of figures.yaml draw: lines out of a record and the metrics of its training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from focus_exp.records.record import Record
from focus_exp.records.rows import ProbeRow, Row
from focus_exp.reporting.canvas import COLOURS
from focus_exp.reporting.formats import READS_FUTURE, about_text
from focus_exp.reporting.paper import paper_speedups
from focus_exp.reporting.speed import series

Metrics = list[dict[str, Any]]
Points = Sequence[tuple[float, float]]
PROBED = [each.name for each in fields(ProbeRow) if each.name not in ("phase", "step", "arm")]
ROUTED = ("attention", "kernels")  # the clocks with routing and without it
STYLES = {"base": "-", "trained": "-.", "hard": "-", "soft": ":", "control": "--", "twin": (0, (1, 3))}


class Line(NamedTuple):
    """curves: what there is to draw of it, by name; style: matplotlib's, where it is not the next one of the figure."""

    label: str
    curves: Mapping[str, Points]
    style: Mapping[str, Any] = {}


class Mark(NamedTuple):
    """A vertical line, unless it is where the axes begin, and a text at the head of the first panel."""

    x: float
    text: str
    text_x: float
    text_y: float


@dataclass(frozen=True)
class Drawing:
    """The facts are those that headings and axes name."""

    lines: list[Line]
    marks: list[Mark] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def losses(record: Record, metrics: Metrics) -> Drawing | None:
    """A line a phase; speed: tokens a second."""
    lines = [Line(phase, curves) for phase, curves in phases_of(metrics).items()]
    speeds = [line["tokens_per_second"] for line in metrics if line.get("tokens_per_second")]
    drawn = any("loss" in line.curves for line in lines)
    return Drawing(lines, facts={"speed": median(speeds) if speeds else None}) if drawn else None


def losses_of_arms(record: Record, metrics: Metrics) -> Drawing | None:
    """A line a phase in the colour of its arm; nothing of more arms than can be told apart."""
    found = {arm.name: phases_of([line for line in metrics if line.get("arm") == arm.name]) for arm in record.arms}
    arms = {name: phases for name, phases in found.items() if any("loss" in curves for curves in phases.values())}
    lines = [
        Line("" if number else name, curves, {"color": colour})
        for (name, phases), colour in zip(arms.items(), COLOURS, strict=False)
        for number, curves in enumerate(phases.values())
    ]
    return Drawing(lines) if 1 < len(arms) <= len(COLOURS) else None


def phases_of(metrics: Metrics) -> dict[str, dict[str, Points]]:
    """phase -> name -> steps and finite values, phases in sequence even where each restarts its steps.

    A step logged twice, before and after a resume, counts once: the later line wins.
    """
    phases: dict[str, dict[str, dict[float, float]]] = {}
    offset = last = 0
    for line in metrics:
        phase = str(line.get("phase", "train"))
        if phase not in phases and line["step"] < last:
            offset = last
        step = offset + line["step"]
        last = max(last, step)
        curves = phases.setdefault(phase, {})
        for name in ("loss", "val_loss"):
            if (value := line.get(name)) is not None and math.isfinite(value):
                curves.setdefault(name, {})[step] = value
    found = {phase: {name: sorted(points.items()) for name, points in own.items()} for phase, own in phases.items()}
    return {phase: own | ({"smooth": smooth(own["loss"])} if "loss" in own else {}) for phase, own in found.items()}


def smooth(points: Points) -> Points:
    """Centred mean over a tenth of the curve."""
    steps, values = np.array(points).T
    window = np.ones(max(1, len(values) // 10) | 1)
    means = np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
    return list(zip(steps, means, strict=True))


def positions(record: Record, metrics: Metrics) -> Drawing | None:
    """Perplexity by position in the window, a line a row, and its ratio to the base's."""
    rows = [row for row in record.rows if row.scored and row.by_position]
    base = next((row for row in rows if row.kind == "base"), None)
    lines = []
    for row in rows:
        style = {"linestyle": STYLES[row.kind], "linewidth": 1.6}
        style |= {"color": "black", "linewidth": 3.0} if row is base else {}
        curves = {"perplexity": _by_position(row)} | ({"ratio": _by_position(row, base)} if base else {})
        lines.append(Line(row.name if row.causal else f"{row.name} ({READS_FUTURE})", curves, style))
    window = record.setting("attention", "window")
    marks = [] if window is None else [Mark(window, f" window {window}", window, 0.98)]
    return Drawing(lines, marks=marks, facts={"base": base}) if rows else None


def _by_position(row: Row, base: Row | None = None) -> Points:
    """Bin centres and perplexities, divided by the base's where `base` is given."""
    reference = {(part["start"], part["end"]): part["nll"] for part in base.by_position} if base else {}
    parts = [((part["start"], part["end"]), part["nll"]) for part in row.by_position]
    known = [(ends, nll - reference.get(ends, 0.0)) for ends, nll in parts if base is None or ends in reference]
    return [(sum(ends) / 2, float(np.exp(change))) for ends, change in known]


def probes(record: Record, metrics: Metrics) -> Drawing | None:
    """What was probed of the groups, a line an arm, phase after phase."""
    starts, end = phase_starts(record.probes)
    lines = []
    for arm in dict.fromkeys(probe.arm for probe in record.probes):
        found = [(starts[probe.phase] + probe.step, probe) for probe in record.probes if probe.arm == arm]
        values = {name: [(step, getattr(probe, name)) for step, probe in found] for name in PROBED}
        known = {name: [point for point in points if point[1] is not None] for name, points in values.items()}
        lines.append(Line(arm or "", known))
    names = list(starts) if len(starts) > 1 else []
    marks = [Mark(starts[name], name, starts[name] + 0.01 * end, 1.0) for name in names]
    return Drawing(lines, marks=marks) if lines else None


def phase_starts(probes: list[ProbeRow]) -> tuple[dict[str, int], int]:
    """The step at which each phase starts if one follows the other, and the last of all."""
    starts, end = {}, 0
    for phase in dict.fromkeys(probe.phase for probe in probes):
        starts[phase] = end
        end += max(probe.step for probe in probes if probe.phase == phase)
    return starts, end


def ratios(record: Record, metrics: Metrics) -> Drawing | None:
    """Ratio to full attention by length, a line a setting with the least k, and the paper's of as many groups."""
    found = {clock: {each.setting: each for each in series(record, clock) if each.timed} for clock in ROUTED}
    keys = sorted({key for clocks in found.values() for key in clocks})
    # the other k have a figure of their own
    keys = [key for key in keys if key.top_k == min(other.top_k for other in keys)]
    lines, rows, colours = [], [], dict(zip(keys, cycle(COLOURS), strict=False))
    for key, colour in colours.items():
        clocks = {clock: own[key] for clock, own in found.items() if key in own}
        first = next(iter(clocks.values()))
        name, curves = first.name, {"name": [], **{clock: each.points for clock, each in clocks.items()}}
        curves |= {f"{clock} of bound": each.of_bound for clock, each in clocks.items()}
        curves |= {"bound": first.bounds} if first.bounds else {}
        rows += [row for each in clocks.values() for row in each.timed]
        if first.clock == "attention" and first.even.slower and first.even.tokens:
            curves["break-even"] = [(first.even.tokens, 1)]
            name += f", breaks even at {about_text(first.even.tokens)}"
        lines.append(Line(name, curves, {"color": colour}))
    lengths = [row.tokens for row in rows]
    for groups, key in {key.groups: key for key in reversed(keys) if key.top_k == 1}.items():
        shown = [point for point in paper_speedups(groups).items() if min(lengths) <= point[0] <= max(lengths)]
        lines.append(Line("", {"paper": shown}, {"color": colours[key]}))
    return Drawing(lines, facts={"rows": rows, "k": keys[0].top_k}) if lines else None
