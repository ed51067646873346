"""Figure 1: times of one run, on one device at one length; methods without a time are listed."""

import pandas as pd
import pytest

from focus_exp.reporting.figures import describe_timing, perplexity_and_speed, untimed_methods
from focus_exp.reporting.frame import Row, to_frame
from focus_exp.reporting.load import Results
from focus_exp.reporting.paper_tables import paper_tables

PPL = {"source": "rows", "metric": "perplexity", "kind": "control", "value": 30.0}
FOCUS = {"source": "speed", "groups": 4, "top_k": 1, "assignment": "balanced"}


def make_rows(run, experiment, rows, device="cpu", commit="a" * 40):
    shared = {"run": run, "experiment": experiment, "status": "finished", "is_variant": False, "setup": "s", "seed": 0}
    place = {"device": device, "device_kind": device, "commit": commit, "model": "m", "data": "d"}
    return [Row(**shared | place | row) for row in rows]


def make_timing(tokens, value, **cells):
    return {"metric": "speedup", "clock": "attention", "tokens": tokens, "value": value, **cells}


@pytest.fixture
def table():
    variants = [
        {**PPL, "kind": "base"},
        {**PPL, "variant": "focus", "method": "focus", "kind": "hard", "num_groups": 4, "top_k": 1},
        {**PPL, "variant": "longformer", "method": "longformer"},
        {**PPL, "variant": "sparq", "method": "sparq"},
    ]
    longformer = {"source": "method_speed", "method": "longformer"}
    earlier = [make_timing(65536, 9.0, **FOCUS), make_timing(65536, 8.0, source="method_speed", method="sparq")]
    last = [
        make_timing(1024, 0.5, **FOCUS),
        make_timing(32768, 2.5, **FOCUS),
        make_timing(32768, 3.5, **longformer),
        make_timing(32768, 4.5, **FOCUS | {"assignment": "trained"}),
    ]
    rows = [
        *make_rows("compared", "compare", variants),
        *make_rows("earlier", "speed_methods", earlier, "NVIDIA H100", "b" * 40),
        *make_rows("last", "speed_methods", last, commit="c" * 40),
        *make_rows("other", "speed", [make_timing(32768, 7.0, source="method_speed", method="sparq")]),
    ]
    facts = {"seed": 0, "device_kind": "cpu", "model": "m", "data": "d", "model_fingerprint": "f"}
    runs = pd.DataFrame([{"run": run, "experiment": "e", **facts} for run in dict.fromkeys(row.run for row in rows)])
    tables = paper_tables(Results(runs.set_index("run"), to_frame(rows)))
    return next(table for table in tables if table.attrs["spec"].name == "figure1")


def test_figure1_has_one_device_one_length_and_the_last_kernels(table):
    speeds = table[table.ours_speed_seeds > 0].set_index("variant").ours_speed
    assert speeds.to_dict() == {"base": 1.0, "focus": 2.5, "longformer": 3.5}
    assert set(table.timed_tokens.dropna()) == {32768}
    assert describe_timing(table) == f"cpu, 32,768 tokens, kernels of commit {'c' * 7}"


def test_figure1_lists_what_has_no_time(table):
    assert untimed_methods(table) == ["sparq"]
    (ax,) = perplexity_and_speed(table).axes
    assert ax.get_xlabel().endswith("Without a time: sparq")
    assert {text.get_text() for text in ax.texts} == {"base", "focus", "longformer"}


def test_figure1_without_any_time_shows_what_has_no_mask(table):
    table = table.assign(timed_tokens=None)
    assert describe_timing(table) == "not timed"
