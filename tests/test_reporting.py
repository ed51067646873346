"""Records, tables, findings, figures and the dashboard, on synthetic runs."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from focus_exp.errors import UserError
from focus_exp.records.environment import commit, environment
from focus_exp.records.metrics import read_metrics
from focus_exp.records.record import Record
from focus_exp.records.rows import ProbeRow, Row
from focus_exp.reporting import wandb as logging
from focus_exp.reporting.figures import write_figures
from focus_exp.reporting.report import all_findings
from focus_exp.reporting.tables import table_of

ROOT = Path(__file__).parent.parent
CONFIG = {
    "experiment": "test",
    "model": {"name": "tiny"},
    "data": {"name": "books"},
    "regime": {"name": "retrofit"},
    "attention": {
        "name": "focus",
        "method": "focus",
        "groups": 4,
        "top_k": 1,
        "pair_rule": "query_topk",
        "window": 128,
        "sinks": 4,
    },
    "eval": {"window": 1024},
}


def make_row(name="focus hard k=1", kind="hard", method="focus", delta=0.03, spread=0.004, **changes) -> Row:
    nll = 3.5 + delta
    bins = [{"start": start, "end": start + 128, "nll": nll, "tokens": 100} for start in range(0, 1024, 128)]
    values = {
        "causal": True,
        "top_k": 1 if kind == "hard" else None,
        "tokens": 800,
        "nll": nll,
        "perplexity": math.exp(nll),
        "perplexity_low": math.exp(nll - 0.1),
        "perplexity_high": math.exp(nll + 0.1),
        "delta_nll": delta,
        "delta_low": delta - spread,
        "delta_high": delta + spread,
        "distant_pairs_kept": 0.2,
        "pairs_removed": 0.6,
        "by_position": bins,
    }
    return Row(name=name, kind=kind, method=method, **{**values, **changes})


def make_record(*rows: Row, **changes) -> Record:
    base = make_row("base, full attention", "base", "full", 0.0, 0.0, distant_pairs_kept=1.0, pairs_removed=0.0)
    values = {"status": "finished", "experiment": "test", "config": CONFIG, "steps": 60, "rows": [base, *rows]}
    return Record(**{**values, **changes})


numbers = st.none() | st.floats(allow_nan=False)
row_strategy = st.builds(
    Row,
    name=st.text(),
    kind=st.sampled_from(["base", "soft", "hard", "control"]),
    method=st.text(),
    causal=st.booleans(),
    top_k=st.none() | st.integers(1, 8),
    by_position=st.lists(
        st.fixed_dictionaries(
            {"start": st.integers(0), "end": st.integers(0), "nll": st.floats(allow_nan=False), "tokens": st.integers()}
        ),
        max_size=2,
    ),
    error=st.none() | st.text(),
    **{name: numbers for name in ("nll", "perplexity", "delta_nll", "delta_vs_hard", "pairs_removed", "seconds")},
)


@given(
    rows=st.lists(row_strategy, max_size=3),
    shares=st.none() | st.lists(st.lists(st.floats(0, 1), max_size=3), max_size=3),
    status=st.sampled_from(["finished", "failed", "interrupted"]),
)
def test_record_round_trips_and_every_view_accepts_it(tmp_path_factory, rows, shares, status):
    path = tmp_path_factory.mktemp("record") / "record.json"
    record = Record(status=status, experiment="x", rows=rows, group_shares=shares, config=CONFIG)
    record.save(path)
    assert Record.load(path) == record
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]
    table = table_of(record, "quality")
    assert table.to_markdown() and table.to_csv() and isinstance(all_findings(record), list)


def test_nan_survives_in_strict_json(tmp_path):
    make_record(make_row(nll=math.nan)).save(tmp_path / "record.json")
    assert "NaN" not in (tmp_path / "record.json").read_text()
    assert math.isnan(Record.load(tmp_path / "record.json").rows[1].nll)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[:-20], "not a readable record"),
        (lambda text: "[]", "schema version list"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": 99'), "schema version 99"),
        (lambda text: text.replace('"seed"', '"sead"'), "sead: Unexpected keyword"),
        (
            lambda text: text.replace('"causal": true', '"causal": "yes"'),
            "rows.0.causal: Input should be a valid boolean",
        ),
        (lambda text: text.replace('"kind": "base"', '"kind": "bass"'), r"rows.0.kind: Input should be 'base'"),
    ],
)
def test_a_bad_record_is_a_user_error(tmp_path, edit, message):
    path = tmp_path / "record.json"
    make_record().save(path)
    path.write_text(edit(path.read_text()))
    with pytest.raises(UserError, match=message):
        Record.load(path)


def test_read_metrics_drops_only_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.5}]
    path.write_text('{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:1"):
        read_metrics(path)


def test_environment_names_versions_and_machine():
    found = Record(status="finished", experiment="x", **environment())
    assert found.versions["python"] and found.versions["torch"] and found.machine["cpu"]


@pytest.mark.parametrize(
    ("said", "known"),
    [
        (["file", "abc", ""], "abc"),
        (["file", "abc", " M focus_exp/config.py"], "abc-dirty"),
        (["file", "abc", None], "abc-dirty"),
        (["file", None], None),
        ([""], None),
    ],
)
def test_the_commit_is_that_of_the_code_that_was_loaded(monkeypatch, said, known):
    answers = iter(said)
    monkeypatch.setattr("focus_exp.records.environment._git", lambda *_: next(answers))
    commit.cache_clear()
    assert [commit(), commit()] == [known, known]  # whatever is committed after the first time
    commit.cache_clear()


def test_table_marks_and_parses_back():
    rows = [
        make_row("focus soft", "soft", pairs_removed=0.0),
        make_row("focus | hard", pairs_removed=0.049),
        make_row("sinkhorn", causal=False, pairs_removed=0.05),
        Row(name="performer", kind="control", method="performer", causal=True, error="out of\nmemory"),
    ]
    record = make_record(*rows, model={"name": "tiny", "substitution": "tiny stands in for gpt2."})
    table = table_of(record, "quality")
    lines = [line for line in table.to_markdown().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]
    assert cells[2][0] == "base, full attention" and cells[2][2] == "-"
    assert [row[4] for row in cells[2:]] == ["0.0 %", "0.0 % (soft gate)", "4.9 % (not engaged)", "5.0 %", "-"]
    assert [row[7] for row in cells[2:]] == ["yes", "yes", "yes", "no: reads the future", "yes"]
    assert cells[6][1] == "failed" and "- performer failed: out of memory" in table.to_markdown()
    assert float(cells[3][1].split()[0]) == pytest.approx(rows[0].perplexity, abs=0.005)
    assert float(cells[3][2].split()[0]) == pytest.approx(100 * math.expm1(0.03), abs=0.005)
    assert "SUBSTITUTE: tiny stands in for gpt2." in table.to_markdown()

    parsed = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [float(row["nll"]) for row in parsed[:4]] == [row.nll for row in record.rows[:4]]
    assert [row["engaged"] for row in parsed] == ["", "", "False", "True", ""]
    assert {row["substitution"] for row in parsed} == {"tiny stands in for gpt2."}

    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table.to_console())
    assert "focus | hard" in (text := console.export_text()) and "tiny stands in" in text


RANDOM = {"name": "random groups", "kind": "control", "method": "random_groups", "delta": 0.1}
FAILED = Row(name="focus hard k=1", kind="hard", method="focus", top_k=1, causal=True, error="no memory")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([make_row(delta=-0.03)], "is better than the base"),
        ([make_row(delta=0.03)], "is worse than the base"),
        ([make_row(delta=0.003)], "is indistinguishable from the base"),
        ([make_row(delta_low=None)], "+3.05 %, no interval"),
        ([make_row()], "keeps 20.0 % of the distant pairs and removes 60.0 %"),
        ([make_row("focus soft", "soft", delta=0.01), make_row()], "Soft-to-hard gap"),
        ([make_row(), make_row(**RANDOM)], "is better than random groups: perplexity 34.12 against 36.60"),
        ([make_row(delta=0.2), make_row(**RANDOM)], "is worse than random groups"),
        ([make_row(delta=0.099), make_row(**RANDOM)], "is not separated from random groups"),
        ([make_row(), make_row(**RANDOM, pairs_removed=0.7)], "different densities"),
        (
            [make_row(), make_row(**RANDOM, delta_vs_hard=-0.1, delta_vs_hard_low=-0.2, delta_vs_hard_high=-0.05)],
            "is worse than random groups",
        ),
        ([make_row(), make_row("w", "control", "window", 0.2)], "better than window and sinks alone (w=128)"),
        ([make_row(), make_row("w", "control", "window", 0.01, window=300)], "worse than a wider window (w=300)"),
        ([make_row(pairs_removed=0.01)], "is not engaged: its mask removes only 1.0 %"),
        (
            [make_row("focus k=3", top_k=3, pair_rule="share", distant_pairs_kept=1.0)],
            "k=3 of K=4 under the rule share keeps every pair: this is full attention, not a result",
        ),
        ([make_row("focus k=3", top_k=3, distant_pairs_kept=1.0)], "k=3 of K=4 keeps every pair"),
        ([make_row(causal=False)], "reads the future and must not be compared"),
        ([make_row(largest_group=0.6)], "in some layer one group holds most tokens (60.0 % in focus hard k=1)"),
        ([make_row(nll=math.nan)], "has no finite loss (nan)"),
        ([FAILED], "focus hard k=1 failed: no memory"),
        ([], "There is no row for focus at its configured k=1"),
    ],
)
def test_findings_say(rows, sentence):
    assert sentence in "\n".join(all_findings(make_record(*rows)))


@pytest.mark.parametrize(("groups", "share", "dominates"), [(2, 0.6, False), (2, 0.8, True), (3, 0.6, True)])
def test_the_larger_of_two_groups_does_not_dominate_by_having_half(groups, share, dominates):
    config = CONFIG | {"attention": CONFIG["attention"] | {"groups": groups}}
    record = make_record(make_row(largest_group=share), config=config)
    record.group_shares, record.layers = [[share, 1 - share, *[0.0] * (groups - 2)]], [0]
    said = "\n".join(all_findings(record))
    assert said.count("in some layer one group holds most") == said.count("one group holds more than") == dominates


@pytest.mark.parametrize(("rule", "shown", "warned"), [("share", "99.8 %", True), ("query_topk", "49.9 %", False)])
def test_a_group_in_which_nearly_all_tokens_are_is_not_said_to_hold_half_of_them(rule, shown, warned):
    """Under the rule share a token is in k groups, and no group can have more than 1/k of the memberships."""
    config = CONFIG | {"attention": CONFIG["attention"] | {"groups": 4, "top_k": 2, "pair_rule": rule}}
    record = make_record(make_row(top_k=2, pair_rule=rule, largest_group=0.499), config=config)
    record.group_shares, record.layers = [[0.499, 0.301, 0.1, 0.1]], [0]
    table = table_of(record, "quality")
    assert table.rows[-1][table.columns.index("largest group (worst layer)")] == shown
    assert any("each is in k groups" in note for note in table.notes) == warned
    said = "\n".join(all_findings(record))
    assert said.count("in some layer one group holds most") == said.count("holds more than 75.0 % of the") == warned


@pytest.mark.parametrize("share", [0.3, 0.872])
def test_a_run_says_that_a_group_took_over_as_a_comparison_does(share):
    probe = {"dominance_worst": 0.999, "dead_groups": 1.9, "dead_groups_worst": 2.0, "entropy": 0.1, "confidence": 0.9}
    record = make_record(make_row())
    record.probes = [ProbeRow(phase="router", step=step, dominance=share, **probe) for step in (0, 60)]
    said = [line for line in all_findings(record) if "is the first of" in line]
    assert len(said) == (share > 0.5) and all("of phase router" in line and "87.2 %" in line for line in said)


@pytest.mark.parametrize(("length", "covered"), [(128, True), (133, True), (134, False)])
def test_where_nothing_is_distant_it_is_the_window_that_is_blamed(length, covered):
    rows = [make_row(f"focus k={k}", top_k=k, pair_rule="share", distant_pairs_kept=1.0) for k in (1, 2)]
    said = "\n".join(all_findings(make_record(*rows, config=CONFIG | {"eval": {"window": length}})))
    blamed = (
        f"The window of 128 and 4 sinks covers all of T={length}: nothing is distant; use a smaller attention.window"
    )
    assert said.count(blamed) == covered and said.count("keeps every pair") == 2 * (not covered)


@pytest.mark.parametrize(("layers", "said"), [([0, 1], False), ([1, 3], True), ([3], True)])
def test_the_table_names_the_layers_where_they_are_some(layers, said):
    shown = table_of(make_record(make_row(), layers=layers), "quality").to_markdown()
    named = f"of the layers {', '.join(map(str, layers))} alone, to which the method is attached"
    assert (named in shown) is said


def test_findings_without_a_verdict():
    assert not any("the base" in said for said in all_findings(make_record(make_row(causal=False))))
    assert not any("engaged" in said for said in all_findings(make_record(make_row())))
    full = {**CONFIG, "attention": {"method": "full"}}
    assert all_findings(make_record(config=full)) == [
        "Only full attention was asked for: there is no sparse attention to judge."
    ]
    assert "no scored base row" in all_findings(make_record(rows=[make_row()]))[0]
    assert "The run failed (boom)" in all_findings(make_record(status="failed", error="boom", rows=[]))[0]
    untrained = all_findings(make_record(make_row(), steps=0, method={"trainable_parameters": 5}))
    assert "Nothing was trained in this run." in untrained
    shares = {"layers": [3, 7], "group_shares": [[0.5, 0.5], [0.9, 0.1]]}
    assert "at worst 90.0 % in layer 7" in "\n".join(all_findings(make_record(make_row(), **shares)))


def test_figures_are_drawn_only_from_data(tmp_path):
    assert write_figures(make_record(rows=[FAILED]), [{"step": 1, "phase": "router", "loss": math.nan}], tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
    metrics = [{"step": step, "phase": phase, "loss": 3.0} for phase in ("router", "all") for step in range(1, 30)]
    record = make_record(make_row(), layers=[0, 1], group_shares=[[0.4, 0.6], [0.5, 0.5]])
    paths = write_figures(record, metrics, tmp_path / "figures")
    assert sorted(paths) == ["group_sizes", "loss_curve", "perplexity_by_position"]
    for path in paths.values():
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 10_000
        assert struct.unpack(">II", content[16:24])[0] == 1350
    assert list(write_figures(make_record(make_row(by_position=[])), [], tmp_path)) == ["perplexity_by_position"]


def test_drawing_again_gives_the_same_bytes(tmp_path):
    record = make_record(make_row(), layers=[0, 1], group_shares=[[0.4, 0.6], [0.5, 0.5]])
    code = "import sys; from pathlib import Path; from focus_exp.records.record import Record; "
    code += "from focus_exp.reporting.figures import write_figures; "
    code += "write_figures(Record.load(sys.argv[1]), [], Path(sys.argv[2]))"
    record.save(tmp_path / "record.json")
    write_figures(record, [], tmp_path / "here")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "record.json"), str(tmp_path / "there")], check=True)
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert {Path(name).suffix for name in names} == {".png", ".svg"} and len(names) == 4
    for name in names:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
    drawn = (tmp_path / "here" / "group_sizes.svg").read_text()
    assert "share of tokens</text>" in drawn and not re.search(r"<dc:date>|20\d\d-\d\d", drawn)


def read_wandb_log(path):
    """kind of item -> key -> value, from the leveldb blocks of a .wandb file; "exit" once the run's end is in it."""
    from wandb.proto import wandb_internal_pb2

    content, position, buffer, found = path.read_bytes(), 7, b"", {"history": {}, "summary": {}}
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        if left < 7 or kind == 0:
            position += left
            continue
        chunk = content[position + 7 : position + 7 + size]
        buffer, position = (chunk if kind in (1, 2) else buffer + chunk), position + 7 + size
        if kind in (1, 4):
            message = wandb_internal_pb2.Record.FromString(buffer)
            if message.HasField("exit"):
                found["exit"] = True
            for name, items in (("history", message.history.item), ("summary", message.summary.update)):
                found[name] |= {item.key or tuple(item.nested_key): json.loads(item.value_json) for item in items}
    return found


def test_an_offline_run_holds_the_table_and_the_scalars(tmp_path, monkeypatch):
    import wandb

    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    record = make_record(make_row(), FAILED, seed=7)
    table = table_of(record, "quality")
    options = logging.init_options(CONFIG)
    assert options == {
        "group": "test", "job_type": None, "tags": ["tiny", "focus", "retrofit", "books", "seed:None"],
    }  # fmt: skip
    arm = logging.init_options({**CONFIG, "job": "train", "arm": "lora", "seed": 1})
    assert arm["job_type"] == "arm" and {"arm:lora", "seed:1"} <= set(arm["tags"])
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path), settings=settings, **options)
    logging.log_record(run, record, [table], write_figures(record, [], tmp_path))
    tags = run.tags
    run.finish()
    assert {"tiny", "finished"} <= set(tags)
    path = next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    patience = time.monotonic() + 20  # another process writes the file
    while "exit" not in (log := read_wandb_log(path)) and time.monotonic() < patience:
        time.sleep(0.1)
    assert log["summary"]["focus hard k=1/nll"] == record.rows[1].nll and log["summary"]["seed"] == 7
    assert log["history"][("quality", "_type")] == "table-file"
    assert log["history"][("figures/perplexity_by_position", "_type")] == "image-file"
    path = log["history"][("quality", "path")]
    stored = json.loads(next((tmp_path / "wandb").glob(f"offline-run-*/files/{path}")).read_text())
    assert [row[stored["columns"].index("nll")] for row in stored["data"]] == [3.5, 3.53, None]


def test_wandb_mode_never_waits_for_a_silent_server(monkeypatch):
    import wandb

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.setenv("NETRC", "/nonexistent")
        monkeypatch.setattr(wandb.setup().settings, "base_url", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        assert logging.wandb_mode("auto") == "offline"
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        started = time.monotonic()
        assert logging.wandb_mode("auto", timeout=0.5) == "offline"
        assert 0.4 < time.monotonic() - started < 2
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert logging.wandb_mode("auto") == "disabled" and logging.wandb_mode("offline") == "offline"
    with pytest.raises(UserError, match="unknown"):
        logging.wandb_mode("sometimes")


def test_reporting_imports_neither_torch_nor_wandb():
    names = ("records.record", "reporting.report", "reporting.wandb")
    assert all(importlib.util.find_spec(f"focus_exp.{name}") for name in names)
    imports = "; ".join(f"import focus_exp.{name}" for name in names)
    code = f"import sys; {imports}; print([name for name in ('torch', 'wandb', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
