"""Jobs that use a router, an adapter's or one that they train first, for something else than its perplexity."""

import re
import signal

import pytest
from running import (
    DUAL,
    fitting,
    only_run,
    outcome,
    record_of,
    records_of,
    router_steps,
    run,
    succeed,
    tiny,
    without_attention,
    write_texts,
)

from focus_exp.errors import UserError
from focus_exp.evaluation import perplexity
from focus_exp.jobs import train
from focus_exp.models.adapter import read_description
from focus_exp.reporting.frame import filter_rows, to_rows
from focus_exp.reporting.load import load_run


@pytest.mark.parametrize("job", ["analyze", "bench", "generate"])
def test_job_precision_follows_a_trained_base(tmp_path, monkeypatch, job):
    def choose(requested, accelerator, trains_base, **measured):
        raise UserError(f"trains_base={trains_base}")

    monkeypatch.setattr("focus_exp.runs.open.choose_precision", choose)
    assert "trains_base=True" in run(*tiny(tmp_path), f"job={job}", "recipe=finetune").err


@pytest.fixture
def adapter(finished_run):
    return only_run(finished_run) / "adapter"


def test_job_with_an_adapter_does_not_read_training_text(tmp_path, adapter):
    settings = [*without_attention(tiny(tmp_path)), "job=evaluate", f"adapter={adapter}", "data.seq_len=100000"]
    result = run(*settings)
    assert result.code == 0, result.err
    assert record_of(tmp_path).status == "finished"


def test_job_bench_of_an_untrained_router_does_not_read_training_text(tmp_path):
    assert run(*tiny(tmp_path), "job=bench", "recipe=none", "data.seq_len=100000").code == 0
    result = run(*tiny(tmp_path), "job=bench", "data.seq_len=100000")
    assert result.code == 2 and "data.seq_len" in result.err


def test_job_evaluate_without_any_score_of_its_tasks_fails(tmp_path, adapter):
    settings = [*without_attention(tiny(tmp_path)), "job=evaluate", f"adapter={adapter}"]
    result = run(*settings, "eval.tasks=[perplexity@400]", "data.max_test_tokens=60")
    assert result.code == 2 and "eval.tasks" in result.err
    record = record_of(tmp_path)
    assert record.status == "failed" and not record.measurements


RETROFIT = ["+experiment=retrofit_124m", "budget=quick", "attention.window=8"]


def test_retrofit_compares_both_routers_and_saves_their_adapters(tmp_path):
    result = succeed(*without_attention(tiny(tmp_path)), *RETROFIT)
    for name in ("focus", "two_encoders"):
        assert re.search(rf"estimate of {name}: [\d.]+ minutes, \d+ passes of [\d.]+ s \(.*scoring \d+\)", result.out)
    assert "the router before its training" in result.out
    comparison, focus, dual = records_of(tmp_path)
    rows = to_rows(filter_rows(load_run(comparison.path.parent).rows, {"source": "rows", "metric": "nll"}))
    routings = {row.name: row.value for row in rows}
    assert list(routings)[:3] == ["base", "focus_soft", "focus_hard"] and list(routings)[-1] == "focus_dual"
    assert len(rows) == len(routings) and {"window_density_matched", "random_size_matched"} < {*routings}
    assert routings["focus_hard"] == focus.find("nll", "focus_hard")
    assert dual.tokens_seen == 2 * dual.setting("data", "seq_len") and dual.fit_seconds > 0
    assert dual.find("importance", "focus_dual") is not None
    adapter = dual.path.with_name("adapter")
    assert read_description(adapter)["method"] == "focus_dual"
    succeed(*without_attention(tiny(tmp_path, "again")), "job=evaluate", f"adapter={adapter}")
    assert record_of(tmp_path / "again").find("nll", "focus_dual") == routings["focus_dual"]


def test_retrofit_with_another_method_runs_it_alone(tmp_path):
    options = ["attention=focus_dual", "recipe=none", "attention.top_k=2", "attention.groups=4"]
    succeed(*without_attention(tiny(tmp_path)), *RETROFIT, *options)
    record = record_of(tmp_path)
    assert record.config["variant"] is None and record.path.parent.name.startswith("focus_dual-seed0-")
    assert record.setting("attention", "density") is None and record.find("nll", "focus_dual") is not None


def test_eval_data_is_scored_and_not_trained_on(tmp_path):
    other = write_texts(tmp_path / "other", words=170)
    options = [*DUAL, "attention.top_k=1", "attention.window=8"]
    moved = [*without_attention(tiny(tmp_path, "moved")), *options, f"eval.data={other}"]
    succeed(*without_attention(tiny(tmp_path, "here")), *options)
    succeed(*moved)
    here, there = record_of(tmp_path / "here"), record_of(tmp_path / "moved")
    weights = [record.path.with_name("adapter") / "focus_adapter.safetensors" for record in (here, there)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert there.data["trained_on"]["fingerprint"] == here.data["fingerprint"] != there.data["fingerprint"]
    assert there.data["requested"] == str(other) and "-other-" in str(there.path)
    assert there.setup != here.setup
    evaluated = [*without_attention(tiny(tmp_path, "evaluated")), "job=evaluate", f"adapter={weights[0].parent}"]
    succeed(*evaluated, f"data.files={other}")
    assert record_of(tmp_path / "evaluated").find("nll", "focus_dual") == there.find("nll", "focus_dual")
    assert "already finished" in succeed(*moved).out
    (other / "0.txt").write_text("another text")
    succeed(*moved)
    assert len(records_of(tmp_path / "moved")) == 2


def test_adapters_of_equal_name_are_rows_of_their_own(tmp_path):
    adapters = []
    for length in ("40", "48"):
        options = [*DUAL, "attention.top_k=1", "attention.window=8", f"data.seq_len={length}"]
        succeed(*without_attention(tiny(tmp_path, length)), *options)
        adapters.append(str(only_run(tmp_path / length) / "adapter"))
    assert run(*tiny(tmp_path), router_steps(1), f"eval.adapters=[{','.join(adapters)}]").code == 0
    record = record_of(tmp_path / "runs")
    names = {m.variant for m in record.measurements if m.variant.startswith("focus_dual")}
    assert len(names) == 2 and len({record.find("nll", name) for name in names}) == 2


def test_fit_to_too_little_text_is_refused(tmp_path):
    short = ["attention=focus_dual", "attention.top_k=1", "recipe=none", "recipe.fit.sequences=30"]
    result = run(*fitting(*tiny(tmp_path), *short, "recipe.fit.validation_sequences=20", "data.max_train_tokens=300"))
    assert result.code == 2 and "recipe.fit.validation_sequences" in result.err
    few = ["attention=focus_dual", "recipe=none", "recipe.fit.sequences=2", "attention.groups=500"]
    result = run(*fitting(*tiny(tmp_path), *few, "recipe.fit.validation_sequences=1"))
    assert result.code == 2 and "attention.groups must be at most" in result.err


@pytest.mark.parametrize("method", [[router_steps(1), "eval.top_k=[1]"], [*DUAL, "attention.top_k=1"]])
def test_train_stopped_at_each_score_gives_the_same_numbers(tmp_path, monkeypatch, method):
    def command(runs):
        options = [*method, f"cache_dir={tmp_path / runs}-cache", "eval.max_sequences=12"]
        return fitting(*tiny(tmp_path, runs), *options)

    whole = run(*command("whole"))
    assert whole.code == 0 and "4 of 12 sequences scored:" in whole.out
    scored, score, fits, fit = [], perplexity.score, [], train.fit_attached

    def stop_at_second_score(*arguments):
        if scored:
            signal.raise_signal(signal.SIGTERM)
        scored.append(arguments[-1])
        return score(*arguments)

    def stop_at_first_fit(*arguments):
        fits.append(arguments[-1])
        if len(fits) == 1:
            signal.raise_signal(signal.SIGTERM)
        return fit(*arguments)

    monkeypatch.setattr(perplexity, "score", stop_at_second_score)
    monkeypatch.setattr(train, "fit_attached", stop_at_first_fit)
    codes, tables = [], []
    while not codes or (codes[-1] and len(codes) < 40):
        scored.clear()
        codes.append(run(*command("stopped")).code)
        tables += [path.read_text() for path in (tmp_path / "stopped").rglob("table.md")]
    assert codes[-1] == 0 and set(codes[:-1]) == {128 + signal.SIGTERM} and len(codes) > 2
    assert "status: interrupted" in tables[0] and "status: finished" in tables[-1]
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


LINEAR = """
from dataclasses import dataclass

import torch

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.options import GroupOptions
from focus_exp.attention.selection import Selection, select

@dataclass
class LinearOptions(GroupOptions):
    is_trainable = True
    is_soft = True

class Linear(AttentionMethod, options=LinearOptions):
    def __init__(self, shape, options):
        super().__init__(shape, options.window, options.sinks)
        self.groups, self.top_k, self.pair_rule = options.groups, options.top_k, options.pair_rule
        self.weight = torch.nn.Parameter(torch.randn(shape.width, options.groups))

    def route(self, h, sequence):
        assignment = (h.float() @ self.weight).softmax(-1)
        if self.losses is not None:
            self.losses.append(assignment.square().mean())
        if self.training or not self.hard:
            return Selection(assignment)
        return select(assignment, self.top_k, self.pair_rule)
"""
FILE = "{name: linear, method: linear_method.Linear, backend: auto, window: 8, sinks: 1, groups: 2, top_k: 1}"


def test_soft_method_from_elsewhere_is_trained_measured_and_timed_as_focus_is(tmp_path, monkeypatch):
    (tmp_path / "linear_method.py").write_text(LINEAR)
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "linear.yaml").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    command = [*without_attention(tiny(tmp_path)), "--config-dir", str(tmp_path), "attention=linear"]
    result = run(*command, router_steps(1))
    assert result.code == 0, result.err
    names = [m.variant for m in record_of(tmp_path).measurements if m.metric == "nll"]
    hard = ["Linear_hard", "Linear_hard_k2_query_topk"]
    controls = ["window_only", "window_density_matched", "random_size_matched"]
    assert names == ["base", "Linear_soft", *hard, *controls]
    (adapter,) = (tmp_path / "runs").rglob("adapter")
    again = [*without_attention(tiny(tmp_path, "timed")), "--config-dir", str(tmp_path), f"adapter={adapter}"]
    result = run(*again, "job=bench")
    assert result.code == 0, result.err
    timed = {m.settings.get("assignment") for m in record_of(tmp_path / "timed").measurements if m.metric == "speedup"}
    assert timed == {"balanced", "trained"}
