"""figures.yaml: what it declares is drawn of the committed records, and a new figure is an entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from focus_exp.errors import UserError
from focus_exp.records.comparison import load_metrics, load_run
from focus_exp.records.record import Record
from focus_exp.records.rows import ProbeRow
from focus_exp.reporting import curves, specs
from focus_exp.reporting.figures import FigureSpec, draw, figure_specs
from focus_exp.reporting.specs import checked

RECORDS = Path(__file__).parent.parent / "runs" / "records"
CONFIDENCE = {
    "draws": "probes",
    "heading": "{{ title }}\nhow sure the router is",
    "height": [4],
    "panels": [{"axes": {"ylabel": "confidence"}, "layers": [{"y": "confidence", "label": "{}"}]}],
    "legend": {},
}


def test_every_declared_layer_has_its_curve_in_some_committed_record():
    found = {}
    for path in RECORDS.rglob("table.md"):
        record = load_run(path.parent)
        for name, spec in figure_specs().items():
            if drawing := getattr(curves, spec.draws)(record, load_metrics(path.parent, record)):
                found.setdefault(name, set()).update(curve for line in drawing.lines for curve in line.curves)
    for name, spec in figure_specs().items():
        missing = {layer.y for panel in spec.panels for layer in panel.layers} - found[name]
        assert missing <= {"val_loss"}, name  # nobody looked at held-out text while it trained


def probed(arm, confidence):
    shares = dict.fromkeys(("dominance", "dominance_worst", "dead_groups", "dead_groups_worst", "entropy"), 0.1)
    values = enumerate(confidence)
    return [ProbeRow(phase="router", step=step, arm=arm, confidence=value, **shares) for step, value in values]


def test_a_new_figure_is_an_entry():
    (spec,) = checked("figures.yaml", {"confidence": CONFIDENCE}, dict[str, FigureSpec]).values()
    record = Record(status="finished", experiment="pair", probes=[*probed("a", (0.2, 0.9)), *probed("b", (0.3, 0.4))])
    (axes,) = draw(spec, record, curves.probes(record, [])).axes
    assert [(line.get_label(), list(line.get_ydata())) for line in axes.lines] == [("a", [0.2, 0.9]), ("b", [0.3, 0.4])]
    assert axes.get_ylabel() == "confidence" and len({line.get_color() for line in axes.lines}) == 2
    assert draw(spec, record, curves.probes(Record(status="finished", experiment="none"), [])) is None


@pytest.mark.parametrize("wrong", [{"draws": "nothing"}, {"colour": "red"}, {"panels": [{"axis": {}}]}])
def test_a_wrong_entry_is_a_user_error(monkeypatch, wrong):
    monkeypatch.setattr(specs, "read_yaml", lambda name: {"confidence": CONFIDENCE | wrong})
    figure_specs.cache_clear()
    with pytest.raises(UserError, match=r"figures.yaml: confidence: "):
        figure_specs()


def test_steps_count_once_and_phases_follow_each_other():
    lines = [{"phase": phase, "step": step, "loss": 3.0} for phase in ("router", "all") for step in (1, 2, 2, 3)]
    lines += [{"phase": "all", "step": 3, "loss": 2.0}, {"phase": "all", "step": 4, "loss": float("nan")}]
    phases = curves.phases_of(lines)
    assert phases["router"]["loss"] == [(1, 3.0), (2, 3.0), (3, 3.0)]
    assert phases["all"]["loss"] == phases["all"]["smooth"] == [(4, 3.0), (5, 3.0), (6, 2.0)]
