"""figures.yaml: what it declares is drawn of the committed records, and a new figure is an entry."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from focus_exp.errors import UserError
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.comparison import load_metrics, load_run
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, ProbeRow, Row
from focus_exp.reporting import curves, specs
from focus_exp.reporting.figures import FigureSpec, draw, figure_specs
from focus_exp.reporting.findings import comparison_findings
from focus_exp.reporting.frontier import frontier, points, ways
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


def test_the_frontier_has_every_arm_at_every_length_against_one_share_of_distant_pairs():
    def task(tokens, arm, removed, distant, difference):
        return BenchmarkRow(
            attention=arm, kind="control", task=f"perplexity@{tokens}", metric="perplexity", pairs_removed=removed,
            distant_share=distant, difference=difference, difference_low=difference - 0.01,
            difference_high=difference + 0.01,
        )  # fmt: skip

    def row(arm, removed, kept, delta):
        return Row(
            name=arm, kind="control", method=arm, causal=True, arm=arm, pairs_removed=removed, distant_pairs_kept=kept,
            delta_nll=delta, delta_low=delta - 0.01, delta_high=delta + 0.01,
        )  # fmt: skip

    arms = [Arm(name="dual_5", settings=[]), Arm(name="dual_20", settings=[])]
    arms.append(Arm(name="wide", settings=["attention.window=512"]))
    record = Record(
        status="finished", experiment="frontier", arms=arms,
        config={"eval": {"window": 64}, "attention": {"window": 8}},
        rows=[row("dual_5", 0.45, 0.1, 0.05), row("dual_20", 0.4, 0.2, 0.01)],
        benchmarks=[
            task(128, "dual_5", 0.72, 0.8, 0.06), task(128, "dual_20", 0.64, 0.8, 0.02),
            task(128, "wide", 0.4, 0.4, 0.1),
        ],
    )  # fmt: skip
    found = {(point.tokens, point.arm): point for point in points(record)}
    assert found[64, "dual_20"].distant == pytest.approx(0.5) and len(found) == 5
    short, long = frontier(record).axes
    assert (short.get_title(), long.get_title()) == ("64 tokens", "128 tokens")
    dual, wide = (container.lines[0] for container in long.containers)
    assert dual.get_xdata() == pytest.approx([10, 20]) and wide.get_xdata() == pytest.approx([50])
    assert dual.get_ydata() == pytest.approx([100 * (math.exp(x) - 1) for x in (0.06, 0.02)])


def test_how_far_it_is_from_one_set_of_groups_to_the_limit_is_said_where_all_three_are_measured():
    def task(arm, method, removed, difference, tokens=4096):
        return BenchmarkRow(
            attention=arm, kind="hard", method=method, task=f"perplexity@{tokens}", metric="perplexity",
            pairs_removed=removed, distant_share=0.8, difference=difference, difference_low=difference - 0.01,
            difference_high=difference + 0.01,
        )  # fmt: skip

    rows = [task("dual", "focus_dual", 0.64, 0.02), task("dual_trained", "focus_dual", 0.64, 0.0)]
    rows += [task("published", "focus", 0.6, 0.07), task("best", "best_tokens", 0.64, 0.01)]
    rows += [task("dual", "focus_dual", 0.64, 0.02, 8192), task("published", "focus", 0.6, 0.07, 8192)]
    record = Record(
        status="finished", experiment="frontier", arms=[Arm(name="dual", settings=[])], benchmarks=rows,
        config={"eval": {"window": 64}, "attention": {"window": 8}},
    )  # fmt: skip
    (way,) = ways(record)
    assert way["covered"] == pytest.approx(5 / 6) and way["own"].kept == pytest.approx(0.2)
    said = [text for text in comparison_findings(record) if "of the way" in text]
    assert said == [
        "At 4,096 tokens dual covers 83.3 % of the way in loss from published, one set of groups for queries and "
        "keys, to tokens chosen by the base's own scores: "
        "published +7.25 % with 25.0 % of the distant pairs, dual +2.02 % with 20.0 % of the distant pairs, "
        "best +1.01 % with 20.0 % of the distant pairs."
    ]


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
