"""Jobs that use a router, an adapter's or one that they train first, for something else than its perplexity."""

import pytest
from running import run, tiny

from focus_exp.errors import UserError


@pytest.mark.parametrize("job", ["analyze", "bench", "generate"])
def test_the_precision_is_that_of_a_base_which_the_job_trains(tmp_path, monkeypatch, job):
    def choose(requested, accelerator, trains_base):
        raise UserError(f"trains_base={trains_base}")

    monkeypatch.setattr(f"focus_exp.jobs.{job}.choose_precision", choose)
    assert "trains_base=True" in run(*tiny(tmp_path), f"job={job}", "regime=finetune").err
