"""Jobs that use a router, an adapter's or one that they train first, for something else than its perplexity."""

import shutil

import pytest
from running import only_run, run, tiny

from focus_exp.__main__ import conf_dir
from focus_exp.errors import UserError
from focus_exp.records.record import Record


@pytest.mark.parametrize("job", ["analyze", "bench", "generate"])
def test_the_precision_is_that_of_a_base_which_the_job_trains(tmp_path, monkeypatch, job):
    def choose(requested, accelerator, trains_base):
        raise UserError(f"trains_base={trains_base}")

    monkeypatch.setattr(f"focus_exp.jobs.{job}.choose_precision", choose)
    assert "trains_base=True" in run(*tiny(tmp_path), f"job={job}", "regime=finetune").err


def test_a_bench_of_a_method_whose_options_were_others_is_refused(tmp_path):
    conf = shutil.copytree(conf_dir(), tmp_path / "conf")
    clocks = ["bench.prefill_lengths=[]", "bench.step_lengths=[]", "bench.decode_lengths=[]"]
    settings = [*tiny(tmp_path), "job=bench", "regime=none", "bench.methods=[performer]", *clocks]
    settings.append(f"--config-path={conf}")
    assert run(*settings).code == 0
    assert run(*settings).out.count("finished already") == 1
    performer = conf / "attention" / "performer.yaml"
    performer.write_text(performer.read_text().replace("features: 256", "features: 128"))
    refused = run(*settings)
    assert refused.code == 2 and "bench.methods=performer: " in refused.err
    assert "was made with its features=256; overwrite=true" in refused.err
    path = only_run(tmp_path) / "record.json"
    record = Record.load(path)
    del record.method["methods"]  # as records had none
    record.save(path)
    assert run(*settings).out.count("finished already") == 1
