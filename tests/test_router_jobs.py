"""Jobs that use a router, an adapter's or one that they train first, for something else than its perplexity."""

import re
import signal

import pytest
from running import fitting, only_run, outcome, record_of, router_steps, run, tiny, without_attention

from focus_exp.errors import UserError
from focus_exp.evaluation import perplexity
from focus_exp.jobs import train
from focus_exp.models.adapter import read_description


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


def test_train_fit_variants_adds_a_row_and_an_adapter(tmp_path):
    options = [router_steps(1), "eval.fit_variants=[shared/two_encoders]", "budget=quick"]
    result = run(*tiny(tmp_path), *options)
    assert result.code == 0
    stages = r"\(training \d+, fit \d+, scoring \d+\)"
    assert re.search(rf"estimate: [\d.]+ minutes, \d+ passes of [\d.]+ s {stages}", result.out)
    assert "the router before its training" in result.out
    record, adapter = record_of(tmp_path), only_run(tmp_path) / "adapter-two_encoders"
    assert record.find("distant_density", "focus_dual") < 1
    tokens = record.find("training_tokens", "focus_dual")
    assert tokens == 2 * record.setting("data", "seq_len") and record.find("fit_seconds", "focus_dual") > 0
    assert record.find("importance", "focus_dual") is not None
    assert f"{record.tokens_seen}, focus_dual {tokens:.0f}" in (adapter.parent / "table.md").read_text()
    assert read_description(adapter)["method"] == "focus_dual"
    assert run(*without_attention(tiny(tmp_path, "again")), "job=evaluate", f"adapter={adapter}").code == 0
    assert record_of(tmp_path / "again").find("nll", "focus_dual") == record.find("nll", "focus_dual")


def test_train_fit_variants_are_fitted_to_texts_of_their_own(tmp_path, caplog):
    other = tmp_path / "other"
    other.mkdir()
    for number in range(5):
        (other / f"{number}.txt").write_text(f"{number} 1 2 4 8 16 32 64 " * 60)
    overlays = tmp_path / "conf" / "variant" / "fits"
    overlays.mkdir(parents=True)
    for name, text in {"here": "", "elsewhere": f"data: {{files: '{other}', max_train_tokens: 2000}}\n"}.items():
        included = "# @package _global_\ndefaults: [/variant/shared/two_encoders, _self_]\n"
        (overlays / f"{name}.yaml").write_text(f"{included}variant: {name}\n{text}")

    def fit(runs, variants, *options):
        command = [*tiny(tmp_path, runs), router_steps(1), "budget=quick", "eval.top_k=[1]", *options]
        result = run(*command, "--config-dir", str(tmp_path / "conf"), f"eval.fit_variants=[{variants}]")
        assert result.code == 0 and "data.files" not in caplog.text, result.err
        folder = only_run(tmp_path / runs)
        return record_of(tmp_path / runs), {
            path.parent.name: path.read_bytes() for path in folder.rglob("*.safetensors")
        }

    both, adapters = fit("runs", "fits/here,fits/elsewhere")
    assert both.find("nll", "focus_dual, here") != both.find("nll", "focus_dual, elsewhere")
    for name, options in {"here": [], "elsewhere": [f"data.files={other}", "data.max_train_tokens=2000"]}.items():
        alone, fitted = fit(name, "fits/here", *options)
        assert alone.find("nll", "focus_dual") is not None
        assert fitted["adapter-here"] == adapters[f"adapter-{name}"]


def test_train_fit_variants_file_that_changed_is_refused(tmp_path):
    overlay = tmp_path / "conf" / "variant" / "fits" / "mine.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_text("# @package _global_\ndefaults: [/variant/shared/two_encoders, _self_]\nvariant: mine\n")
    command = [*tiny(tmp_path), router_steps(1), "budget=quick", "--config-dir", str(tmp_path / "conf")]
    command.append("eval.fit_variants=[fits/mine]")
    assert run(*command).code == 0 and "already finished" in run(*command).out
    overlay.write_text(overlay.read_text() + "attention: {density: 0.9}\n")
    result = run(*command)
    assert result.code == 2 and "mine" in result.err and "overwrite=true" in result.err
    assert run(*command, "overwrite=true").code == 0


def test_adapters_of_equal_name_are_rows_of_their_own(tmp_path):
    options = [router_steps(1), "eval.fit_variants=[shared/two_encoders]", "budget=quick"]
    adapters = []
    for length in ("40", "48"):
        assert run(*tiny(tmp_path, length), *options, f"data.seq_len={length}").code == 0
        adapters.append(str(only_run(tmp_path / length) / "adapter-two_encoders"))
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


def test_train_fit_variants_stopped_at_each_score_gives_the_same_numbers(tmp_path, monkeypatch):
    def command(runs):
        options = ["eval.fit_variants=[shared/two_encoders]", "budget=quick", f"cache_dir={tmp_path / runs}-cache"]
        return [*tiny(tmp_path, runs), router_steps(1), *options, "eval.max_sequences=12", "eval.top_k=[1]"]

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
    assert codes[-1] == 0 and set(codes[:-1]) == {128 + signal.SIGTERM} and len(codes) > 12
    assert "status: interrupted" in tables[0] and "focus_dual" not in tables[0]
    assert "status: finished" in tables[-1] and "focus_dual" in tables[-1]
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
