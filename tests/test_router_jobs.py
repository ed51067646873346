"""Jobs that use a router, an adapter's or one that they train first, for something else than its perplexity."""

from dataclasses import replace

import pytest
from builders import make_config
from running import fitting, only_run, record_of, router_steps, run, tiny, without_attention

from focus_exp.errors import UserError
from focus_exp.jobs.bench import check_earlier_methods
from focus_exp.models.adapter import read_description
from focus_exp.results.record import Record
from focus_exp.results.run_dir import run_folder


@pytest.mark.parametrize("job", ["analyze", "bench", "generate"])
def test_job_precision_follows_a_trained_base(tmp_path, monkeypatch, job):
    def choose(requested, accelerator, trains_base):
        raise UserError(f"trains_base={trains_base}")

    monkeypatch.setattr("focus_exp.jobs.run.choose_precision", choose)
    assert "trains_base=True" in run(*tiny(tmp_path), f"job={job}", "recipe=finetune").err


def test_job_bench_with_changed_options_of_methods_is_refused(tmp_path):
    config = make_config(*tiny(tmp_path), "job=bench", "recipe=none", "bench.methods=[performer]")
    record = Record(status="finished", experiment="adhoc", method={"methods": {"performer": {"features": 128}}})
    record.save(run_folder(config) / "record.json")
    check_earlier_methods(config, {"performer": {"features": 128}})
    with pytest.raises(UserError, match="performer must have features=128"):
        check_earlier_methods(config, {"performer": {"features": 256}})
    replace(record, method={}).save(run_folder(config) / "record.json")  # as records had none
    check_earlier_methods(config, {"performer": {"features": 256}})


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
    assert record.status == "failed" and record.find("nll", "base")


def test_job_train_strings_of_special_tokens_are_one_warning_with_their_count(tmp_path):
    settings = fitting(*tiny(tmp_path), "attention=window", "recipe=none")
    text = next((tmp_path / "texts").glob("*.txt"))
    text.write_text(text.read_text() + "<|endoftext|> and <|endoftext|>.")
    assert run(*settings).code == 0
    (warning,) = (sentence for sentence in record_of(tmp_path).warnings if "special tokens" in sentence)
    assert warning.startswith("2 strings")
    split = run(*settings, "data.split_special_tokens=true")
    assert split.code == 0 and "special tokens" not in split.err


def test_train_fit_variants_adds_a_row_and_an_adapter(tmp_path):
    settings = [*tiny(tmp_path), router_steps(1), "eval.fit_variants=[shared/two_encoders]", "budget=quick"]
    assert run(*settings).code == 0
    record, adapter = record_of(tmp_path), only_run(tmp_path) / "adapter-two_encoders"
    assert record.find("distant_density", "focus_dual") < 1
    assert read_description(adapter)["method"] == "focus_dual"
    assert run(*without_attention(tiny(tmp_path, "again")), "job=evaluate", f"adapter={adapter}").code == 0
    assert record_of(tmp_path / "again").find("nll", "focus_dual") == record.find("nll", "focus_dual")
