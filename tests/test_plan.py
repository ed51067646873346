"""job=plan: the formulas against known counts and against traces of the real training step."""

from dataclasses import replace

import pytest
from builders import make_config
from running import fitting, run, succeed

from focus_exp.jobs import plan
from focus_exp.jobs.plan import GIB, GPUS, measure, plan_on, plan_run

TINY = ["job=plan", "model=tiny_llama", "data.seq_len=64", "eval.seq_len=64"]
LORA, FULL = ("attention=full", "recipe=lora"), ("attention=full", "recipe=finetune")
# bytes held at the worst moment and FLOPs per token of steps of 1,024 tokens in bfloat16, measured on traces of the
# training step under FakeTensorMode: model, overrides, GPUs -> GiB, FLOPs
TRACED = [
    ("gpt2_124m", (), 1, 1.82, 5.595e8),
    ("gpt2_124m", LORA, 1, 1.23, 5.576e8),
    ("gpt2_124m", FULL, 1, 3.34, 8.073e8),
    ("gpt2_774m", FULL, 1, 17.3, 4.963e9),
    ("mistral_7b", (), 1, 23.4, 2.940e10),
    ("mistral_7b", LORA, 1, 19.1, 2.934e10),
    ("qwen2_5_7b", (), 1, 24.3, 2.902e10),
    ("llama2_13b", (), 1, 37.4, 5.282e10),
    ("llama2_70b", (), 8, 68.0, 2.798e11),
]


def planned(*overrides):
    length = 64 if "model=tiny_llama" in overrides else 1024
    lengths = (f"data.seq_len={length}", f"eval.seq_len={length}")
    return make_config("trainer.batch_size=1", "trainer.accumulate=8", *lengths, *overrides)


@pytest.mark.parametrize(("model", "overrides", "gpus", "held", "flops"), TRACED)
def test_plan_memory_and_flops_match_traces(model, overrides, gpus, held, flops):
    config = planned(f"model={model}", "recipe.steps=10", *overrides)
    item = plan_run("run", config)
    assert (item.error, item.gpus) == ("", gpus)
    assert item.held / GIB == pytest.approx(held, rel=0.1)
    assert item.flops / item.tokens == pytest.approx(flops, rel=0.02)


def test_plan_checkpointing_trades_activations_for_flops():
    plain = planned("model=tiny_llama")
    saving = replace(plain, trainer=replace(plain.trainer, gradient_checkpointing=True))
    sizes = measure(plain)
    before, after = (plan_on("run", config, sizes, "single", 1) for config in (plain, saving))
    assert after.activations < before.activations
    assert after.flops > before.flops
    assert after.weights == before.weights


def test_plan_fsdp_shards_a_trained_base():
    config = planned("model=mistral_7b", *FULL)
    sizes = measure(config)
    single, few, many = (plan_on("run", config, sizes, *layout) for layout in (("single", 1), ("fsdp", 2), ("fsdp", 8)))
    assert many.optimizer == single.optimizer / 8
    assert many.held < few.held < single.held
    assert many.hours == pytest.approx(single.hours / 8)


def test_plan_takes_the_fewest_gpus_that_fit(monkeypatch):
    config = planned("model=tiny_llama", *FULL)
    held = plan_run("run", config).held
    monkeypatch.setitem(GPUS, "h100", (0.8 * held / plan.USABLE / GIB, 1e12, 1e12))
    item = plan_run("run", config)
    assert item.strategy == "fsdp" and item.gpus > 1
    assert plan_on("run", config, measure(config), "fsdp", item.gpus // 2).held > 0.8 * held


def test_plan_job_that_does_not_fit_exits_with_2(monkeypatch):
    monkeypatch.setitem(GPUS, "h100", (1e-4, 1e12, 1e12))
    result = run("+experiment=retrofit_124m", *TINY, "plan.gpus=1")
    assert result.code == 2
    assert "tiny_llama" in result.out


def test_plan_job_neither_downloads_nor_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    succeed("+experiment=retrofit_124m", *TINY)
    assert not list(tmp_path.iterdir())


def test_plan_models_are_rows():
    result = succeed(*fitting("job=plan", "plan.models=[tiny_llama,tiny_gpt2]", "data.seq_len=64", "eval.seq_len=64"))
    assert "tiny_llama" in result.out and "tiny_gpt2" in result.out
