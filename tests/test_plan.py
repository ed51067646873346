"""job=plan: the formulas against known counts and against traces of the real training step."""

import re

import pytest
from builders import CONF, make_config
from hydra import compose, initialize_config_dir
from running import run, succeed

from focus_exp.checks import parse
from focus_exp.config import GPUS, register_schemas
from focus_exp.errors import UserError
from focus_exp.jobs.plan import MEMORY, PEAK, USABLE, plan_run
from focus_exp.runs.compose import compose_variant

TINY = ["job=plan", "model=tiny_llama", "data.seq_len=64", "eval.seq_len=64"]
LORA, FULL = ("attention=full", "recipe=lora"), ("attention=full", "recipe=finetune")
SHARDED = ["trainer.strategy=fsdp"]
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


def fit_gpus(monkeypatch, gib):
    """Give a GPU of which `gib` are usable."""
    monkeypatch.setitem(MEMORY, "h100", gib / USABLE)


@pytest.mark.parametrize(("model", "overrides", "gpus", "held", "flops"), TRACED)
def test_plan_memory_and_flops_match_traces(model, overrides, gpus, held, flops):
    item = plan_run(planned(f"model={model}", "recipe.steps=10", *overrides))
    assert item["gpus"] == gpus and item["held"] == pytest.approx(held, rel=0.1)
    assert item["pflop"] * 1e15 / (10 * 8 * 1024) == pytest.approx(flops, rel=0.02)


def test_plan_checkpointing_trades_activations_for_flops():
    before, after = (
        plan_run(planned("model=tiny_llama", f"trainer.gradient_checkpointing={saving}"))
        for saving in ("false", "true")
    )
    assert after["held"] < before["held"] and after["weights"] == before["weights"]
    assert after["pflop"] > before["pflop"]


def test_plan_fsdp_shards_a_trained_base():
    single, few, many = (
        plan_run(planned("model=mistral_7b", *FULL, "plan.gpu=b200", f"trainer.devices={gpus}", *layout))
        for gpus, layout in ((1, ["trainer.batch_size=1"]), (2, SHARDED), (8, SHARDED))
    )
    assert many["held"] < few["held"] < single["held"]
    assert many["hours"] == pytest.approx(single["hours"] / 8)


def test_plan_takes_the_fewest_gpus_that_fit(monkeypatch):
    config = planned("model=tiny_llama", *FULL)
    held = plan_run(config)["held"]
    fit_gpus(monkeypatch, 0.8 * held)
    item = plan_run(config)
    assert item["strategy"] == "fsdp" and item["gpus"] > 1
    with pytest.raises(UserError, match="plan.gpus"):
        plan_run(planned("model=tiny_llama", *FULL, f"plan.gpus={item['gpus'] // 2}"))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("model=llama2_70b", "trainer.accumulate=1"), "trainer.accumulate"),
        (("model=llama2_70b", "attention=focus_dual"), "recipe.fit.sequences"),
        (("trainer.devices=2", "trainer.strategy=single"), "trainer.devices"),
        (("recipe=finetune", "model.quantization=nf4"), "model.quantization"),
        (("attention.backend=cpu",), "attention.backend"),
    ],
)
def test_plan_refuses_what_the_run_refuses(overrides, key):
    result = run("job=plan", "model=gpt2_124m", "trainer.batch_size=1", "trainer.accumulate=8", *overrides)
    assert result.code == 2 and key in result.err


def test_plan_refuses_another_architecture_of_pretrained_weights():
    changed = ("model=gpt2_124m", "model.architecture.n_layer=10")
    assert run("job=plan", *changed).code == run(*changed).code == 2
    succeed("job=plan", *changed, "model.hub_id=null")


def test_plan_hours_count_trials():
    tuned = plan_run(planned("model=tiny_llama", "recipe.tune.factors=[1,3]"))
    assert tuned["hours"] == pytest.approx(3 * plan_run(planned("model=tiny_llama"))["hours"])


def test_plan_gpus_have_memory_and_peak():
    assert set(GPUS) == set(MEMORY) == set(PEAK)


def test_plan_job_that_does_not_fit_exits_with_2(monkeypatch):
    fit_gpus(monkeypatch, 1e-4)
    result = run("+experiment=retrofit_124m", *TINY, "plan.gpus=1")
    assert result.code == 2
    assert "focus: " in result.err and "two_encoders: " in result.err


def test_plan_job_neither_downloads_nor_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    succeed("+experiment=retrofit_124m", *TINY)
    assert not list(tmp_path.iterdir())


def test_plan_variants_are_rows():
    result = succeed("+experiment=model_scale", "budget=paper", "job=plan", "variants=[gpt2_124m,mistral_7b]")
    assert "gpt2_124m" in result.out and "mistral_7b" in result.out


PAGE = CONF.parent / "docs" / "at_scale.md"


def test_plan_numbers_of_the_page_follow_from_its_commands():
    page = PAGE.read_text(encoding="utf-8")
    commands = [line.partition(" #")[0].split("focus_exp ")[1] for line in page.splitlines() if "+experiment=" in line]
    register_schemas()
    rows = [[float(cell) for cell in re.findall(r"\| ([\d.]+) (?=\|)", line)] for line in page.splitlines()]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        items = [plan_command(command.split()) for command in commands[:4]]
    assert [row for row in rows if row] == [
        [item["gpus"], *(float(f"{item[key]:.3g}") for key in ("held", "hours", "checkpoint"))] for item in items
    ]


def plan_command(overrides):
    """Plan a command; of a comparison its variant `focus`, or the one that it chooses."""
    config = parse(compose("config", overrides))
    if config.job != "compare":
        return plan_run(config)
    name = config.variant or "focus"
    return plan_run(compose_variant(config, name, overrides))
