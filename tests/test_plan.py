"""job=plan: the formulas against known counts and against traces of the real training step."""

import re
from dataclasses import replace

import pytest
from builders import CONF, make_config
from hydra import compose, initialize_config_dir
from running import fitting, run, succeed

from focus_exp.checks import parse
from focus_exp.config import TuneConfig, register_schemas
from focus_exp.jobs import plan
from focus_exp.jobs.compose import compose_variant
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
    assert many.hours["phases"] == pytest.approx(single.hours["phases"] / 8)
    assert many.hours["evaluation"] == single.hours["evaluation"]  # process 0 evaluates


def test_plan_takes_the_fewest_gpus_that_fit(monkeypatch):
    config = planned("model=tiny_llama", *FULL)
    held = plan_run("run", config).held
    monkeypatch.setitem(GPUS, "h100", (0.8 * held / plan.USABLE / GIB, 1e12, 1e12))
    item = plan_run("run", config)
    assert item.strategy == "fsdp" and item.gpus > 1
    assert plan_on("run", config, measure(config), "fsdp", item.gpus // 2).held > 0.8 * held


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("model=llama2_70b", "trainer.accumulate=1"), "trainer.accumulate"),
        (("model=llama2_70b", "eval.fit_variants=[shared/two_encoders]"), "eval.fit_variants"),
        (("model=llama2_70b", "attention=focus_dual"), "attention.calibration_sequences"),
        (("trainer.devices=2", "trainer.strategy=single"), "trainer.devices"),
        (("recipe=finetune", "model.quantization=nf4"), "model.quantization"),
        (("attention.backend=cpu",), "attention.backend"),
        (("eval.fit_variants=[compare/window]",), "eval.fit_variants"),
    ],
)
def test_plan_refuses_what_the_run_refuses(overrides, key):
    result = run("job=plan", "model=gpt2_124m", "trainer.batch_size=1", "trainer.accumulate=8", *overrides)
    assert result.code == 2 and key in result.err


def test_plan_refuses_another_architecture_of_pretrained_weights():
    changed = ("model=gpt2_124m", "model.architecture.n_layer=10")
    assert run("job=plan", *changed).code == run(*changed).code == 2
    succeed("job=plan", *changed, "model.hub_id=null")


def plan_fitted(*overrides):
    config = planned("model=tiny_llama", "eval.fit_variants=[shared/two_encoders]", *overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return plan_run("run", config)


def test_plan_counts_every_stage():
    tuned = ("recipe.tune.factors=[1,3]", "recipe.tune.sequences=4", "eval.controls=false", "eval.top_k=[1]")
    config = planned("model=tiny_llama", "recipe.steps=50", "eval.max_sequences=10", *tuned)
    plain = plan_run("run", replace(config, recipe=replace(config.recipe, tune=TuneConfig())))
    item, stages = plan_run("run", config), plain.hours
    evaluated = 64 * 10 * 3 * sum(plan.forward_flops(measure(config), 64))  # base, soft and hard routing
    assert stages["evaluation"] * plan.hourly_flops(config) == pytest.approx(evaluated)
    assert plain.per_million == pytest.approx(stages["evaluation"] * 1e6 / (64 * 10))
    one = stages["fits"] + stages["phases"] + 0.4 * stages["evaluation"]
    assert stages["trials"] == 0 and item.hours == stages | {"trials": pytest.approx(2 * one)}
    assert plan_run("run", planned("model=tiny_llama", "attention.warm_start_sequences=0")).warm_start == 0
    fitted = plan_fitted(*tuned[2:])
    assert fitted.hours["fits"] > stages["fits"] and fitted.per_million == pytest.approx(plain.per_million * 4 / 3)


def test_plan_names_what_its_hours_leave_out():
    known, unknown = ("eval.max_sequences=4", "eval.tasks=[]"), ("eval.max_sequences=null", "eval.tasks=[perplexity@8]")
    assert plan_run("run", planned("model=tiny_llama", *known)).without == []
    missing = plan_fitted(*unknown).without
    assert [next(key for key in ("max_sequences", "tasks", "layers") if key in part) for part in missing] == [
        *("max_sequences", "tasks", "layers")
    ]
    assert "perplexity@8" in succeed("+experiment=retrofit_124m", *TINY, *unknown[1:]).out


def test_plan_memory_of_the_warm_start_counts():
    config = planned("model=mistral_7b", "attention.warm_start_sequences=100")
    item = plan_run("run", config)
    assert item.warm_start == 2 * 100 * 32 * 1024 * (4096 + 1024)
    assert item.held == item.weights + item.warm_start


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


PAGE = CONF.parent / "docs" / "at_scale.md"


def test_plan_numbers_of_the_page_follow_from_its_commands():
    page = PAGE.read_text(encoding="utf-8")
    commands = [line.partition(" #")[0].split("focus_exp ")[1] for line in page.splitlines() if "+experiment=" in line]
    register_schemas()
    rows = [[float(cell) for cell in re.findall(r"\| ([\d.]+) (?=\|)", line)] for line in page.splitlines()]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        items = [plan_command(command.split()) for command in commands[:4]]
    assert [row for row in rows if row] == [
        [item.gpus, *(float(f"{x:.3g}") for x in (item.held / GIB, sum(item.hours.values()), item.checkpoint / GIB))]
        for item in items
    ]


def plan_command(overrides):
    """Plan a command; of a comparison its variant `focus`, or the one that it chooses."""
    config = parse(compose("config", overrides))
    if config.job != "compare":
        return plan_run("run", config)
    name = config.variant or "focus"
    return plan_run("run", compose_variant(config, name, overrides))
