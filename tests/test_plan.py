"""job=plan: the traced step is the real one, the numbers are those that a run is measured to take, refusals help."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from conftest import ZOO
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from running import attention_of, fitting, run, tiny
from test_experiments import composed
from torch.utils.data import Dataset

from focus_exp.checks import parse
from focus_exp.config import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    PhaseConfig,
    PlanConfig,
    RegimeConfig,
    TrainerConfig,
)
from focus_exp.errors import UserError
from focus_exp.jobs.plan import needs_of
from focus_exp.models.attach import attach
from focus_exp.models.lora import add_lora, router_parameters
from focus_exp.models.random import architecture_config, random_model
from focus_exp.planning.estimate import Estimate, sample
from focus_exp.planning.hardware import GIB, GPUS, gpu_named
from focus_exp.planning.search import layouts, plan_run
from focus_exp.planning.settings import Setting, candidates, needs, sequences, sizes
from focus_exp.planning.trace import trace_inference
from focus_exp.speed.timing import PeakMemory, in_fresh_process
from focus_exp.training.callbacks import Checkpoint
from focus_exp.training.precision import Precision
from focus_exp.training.regimes import train_phases

CPU = torch.device("cpu")
H100 = GPUS["h100"]
TRAINS = {"retrofit": "router", "lora": "lora", "full": "all", "finetune": "all"}
# 20 to 60 million parameters, of the proportions of real models
LLAMA = {
    "model_type": "llama", "vocab_size": 16384, "max_position_embeddings": 2048, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 16384, "n_positions": 1024, "n_embd": 512, "n_layer": 6, "n_head": 8,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 16384, "max_position_embeddings": 2048, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "sliding_window": 512, "query_pre_attn_scalar": 64, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
ARCHITECTURES = {"llama": LLAMA, "gpt2": GPT2, "gemma2": GEMMA2}


@dataclass(frozen=True)
class Case:
    """A run that is both planned and measured; regime finetune trains routers and base, full has no router."""

    architecture: str = "llama"
    regime: str = "retrofit"
    checkpointing: bool = False
    batch: int = 1
    accumulate: int = 1
    precision: str = "float32"
    length: int = 1024

    def __str__(self) -> str:
        how = "checkpointed" if self.checkpointing else "plain"
        return f"{self.architecture}-{self.regime}-{how}-{self.precision}-{self.batch}x{self.accumulate}"

    @property
    def config(self) -> Config:
        method = "full" if self.regime in ("lora", "full") else "focus"
        phase = PhaseConfig(train=TRAINS[self.regime], steps=2, learning_rate=1e-4, warmup_steps=0)
        return Config(
            model=ModelConfig(name=self.architecture, architecture=ARCHITECTURES[self.architecture]),
            attention=attention_of(method),
            regime=RegimeConfig(name=self.regime, phases={"phase": phase}),
            data=DataConfig(name="text", source="files", block_size=self.length),
            eval=EvalConfig(name="eval"),
            plan=PlanConfig(name="plan"),
            trainer=TrainerConfig(
                name="trainer", accelerator="cpu", precision=self.precision, batch_size=self.batch,
                accumulate=self.accumulate, gradient_checkpointing=self.checkpointing, progress=False,
            ),
        )  # fmt: skip


def prepare(model, regime):
    if regime in ("retrofit", "finetune"):
        attach(model, "focus")
    if regime == "lora":
        add_lora(model, RegimeConfig(name="lora").lora, router_parameters(model, 4, 16))
    return model


def estimate_of(case, config=None, gpu=True):
    return Estimate(config or case.config, lambda model: prepare(model, case.regime), gpu=gpu)


class Text(Dataset):
    """Random tokens, drawn from the index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 16384, (self.length,), generator=generator)}


def train(case, device, folder):
    """The run itself, from the loading of the weights, by the code that every run takes."""
    config = case.config
    bf16, trains_base = case.precision == "bf16", TRAINS[case.regime] == "all"
    weights = torch.bfloat16 if bf16 and not trains_base else torch.float32
    precision = Precision(device, weights, bf16 and trains_base, "test")
    model = random_model(architecture_config(config.model), 0, weights).to(device)
    train_phases(prepare(model, case.regime), Text(case.length), config, precision, folder, [])


def measure(case):
    """Bytes that the run takes at most, in a process that has imported and compiled before what it needs."""
    torch.set_num_threads(1)
    Checkpoint.on_train_batch_end = lambda *_: None  # written to disk through main memory, where the weights are here
    with TemporaryDirectory() as folder:
        train(replace(case, length=32), CPU, Path(folder, "small"))
        return PeakMemory(CPU).of(lambda: train(case, CPU, Path(folder)))


MEASURED = [
    pytest.param(Case(), id=str(Case())),
    *(
        pytest.param(case, marks=pytest.mark.slow, id=str(case))
        for case in (
            Case(checkpointing=True, batch=2),
            Case(regime="lora", checkpointing=True, batch=2),
            Case(regime="full"),
            Case(regime="full", checkpointing=True),
            Case(regime="finetune"),
            Case(precision="bf16", batch=2),
            Case("gpt2", "full", batch=2, accumulate=2),
            Case("gemma2", "lora", batch=2),
        )
    ),
]


@pytest.mark.skipif(PeakMemory(CPU).before is None, reason="the resident set is not known here")
@pytest.mark.parametrize("case", MEASURED)
@pytest.mark.slow
def test_planned_memory_is_what_a_run_takes(case):
    measured = in_fresh_process(measure, case)
    planned = needs(estimate_of(case, gpu=False), Setting(checkpointing=case.checkpointing), H100).total
    assert planned == pytest.approx(measured, rel=0.15), f"{planned / 2**20:.0f} MiB, not {measured / 2**20:.0f}"


@pytest.mark.gpu
@pytest.mark.parametrize("regime", TRAINS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_memory_is_what_a_run_takes_on_a_gpu(tmp_path, regime, checkpointing):
    case = Case("gpt2", regime, checkpointing, batch=4, precision="bf16")
    train(replace(case, length=32), torch.device("cuda"), tmp_path / "small")
    measured = PeakMemory(torch.device("cuda")).of(lambda: train(case, torch.device("cuda"), tmp_path))
    planned = needs(estimate_of(case), Setting(checkpointing=checkpointing), H100).total
    assert planned == pytest.approx(measured, rel=0.15), f"{planned / 2**20:.0f} MiB, not {measured / 2**20:.0f}"


def tiny_estimate(family, regime="retrofit", layers=None, **changes):
    """Of a tiny model, whose layers are repeated until there are `layers`."""
    architecture = OmegaConf.to_container(OmegaConf.load(ZOO / f"tiny_{family}.yaml").architecture)
    if layers:
        architecture["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
        if "layer_types" in architecture:
            architecture["layer_types"] = (architecture["layer_types"] * layers)[:layers]
    case = Case(regime=regime, length=64)
    config = replace(case.config, model=ModelConfig(name=family, architecture=architecture))
    config = replace(config, trainer=replace(config.trainer, **changes))
    return Estimate(config, lambda model: prepare(model, regime))


def test_a_phase_that_aims_at_the_base_computes_that_too():
    traces = []
    for aim in ("text", "base"):
        estimate = tiny_estimate("llama")
        estimate.phases = [(name, replace(phase, aim=aim)) for name, phase in estimate.phases]
        traces += estimate.traces(1)
    text, base = traces
    own = tiny_estimate("llama", "full").whole(lambda model: trace_inference(model, (1, 64)))
    assert base.flops == text.flops + own.flops
    peaks = [max(sum(held.values()) for held in trace.peaks.values()) for trace in traces]
    assert peaks[0] < peaks[1]


EXTRAPOLATED = list(product([("gpt2", 5), ("llama", 4), ("gemma2", 7)], TRAINS, [False, True]))
# each family, regime and way to hold activations once; all of them in `make test-all`
QUICK = [EXTRAPOLATED[index] for index in (0, 3, 8, 12, 21)]


@pytest.mark.parametrize(
    ("family", "layers", "regime", "checkpointing"),
    [
        pytest.param(*family, *others, marks=() if (family, *others) in QUICK else pytest.mark.slow)
        for family, *others in EXTRAPOLATED
    ],
)
def test_a_few_layers_say_what_all_of_them_take(monkeypatch, family, layers, regime, checkpointing):
    few = tiny_estimate(family, regime, layers)
    assert sample(layers, getattr(few.architecture, "layer_types", None))[1] < layers
    monkeypatch.setattr("focus_exp.planning.estimate.sample", lambda layers, kinds: (2, layers))
    every = tiny_estimate(family, regime, layers)
    (extrapolated,), (traced,) = (estimate.traces(2, checkpointing) for estimate in (few, every))
    assert extrapolated.flops == pytest.approx(traced.flops)
    assert extrapolated.pair_flops == pytest.approx(traced.pair_flops)
    for window, held in traced.peaks.items():
        assert sum(extrapolated.peaks[window].values()) == pytest.approx(sum(held.values())), window


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), st.integers(2, 40))
def test_sampled_layers_end_in_the_kind_in_which_all_do(pattern, layers):
    kinds = (pattern * layers)[:layers]
    few, more = sample(layers, kinds)
    assert 2 <= few < more
    if more < layers:
        assert (layers - few) % (more - few) == 0
        assert kinds[few - 1] == kinds[more - 1] == kinds[-1]


def test_arithmetic_of_full_training_is_known():
    """Six FLOPs a token for every weight of a matrix; of attention two products forward and five backward, on pairs
    whose key is not in the future."""
    estimate = tiny_estimate("llama", "full", layers=3)
    (trace,) = estimate.traces(2)
    model = estimate.build()
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    tokens, width = 2 * 64, model.config.num_attention_heads * model.config.head_dim
    assert trace.flops - trace.pair_flops == 6 * matrices * tokens
    pairs = tokens * (64 + 1) / 2
    assert trace.pair_flops == pytest.approx(3 * 7 * 2 * pairs * width, rel=0.01)  # and the rotary angles


def test_soft_gates_are_counted_over_all_pairs():
    """The arithmetic on pairs grows with the square of the length, that on tokens in proportion."""
    flops = []
    for length in (512, 1024):
        estimate = tiny_estimate("llama")
        estimate.config.data.block_size = length
        (trace,) = estimate.traces(1)
        flops.append((trace.flops - trace.pair_flops, trace.pair_flops))
    assert flops[1][0] == pytest.approx(2 * flops[0][0], rel=0.01)
    assert 3 < flops[1][1] / flops[0][1] < 4  # blocks of queries stop at their own end


def test_checkpointing_trades_activations_for_arithmetic():
    estimate = tiny_estimate("llama", layers=8)
    plain, checkpointed = (needs(estimate, Setting(checkpointing=on), H100) for on in (False, True))
    assert checkpointed.held["activations"] < plain.held["activations"] / 3
    assert checkpointed.flops > 1.2 * plain.flops
    assert checkpointed.held["weights"] == plain.held["weights"]


@pytest.fixture(scope="module")
def trained():
    return {regime: tiny_estimate("llama", regime) for regime in ("retrofit", "finetune")}


@given(st.sampled_from(["retrofit", "finetune"]), st.integers(1, 6))
@settings(max_examples=15)
def test_sharding_leaves_each_gpu_less(trained, regime, power):
    estimate, gpus = trained[regime], 2**power
    single, ddp, sharded, wider, offloaded = (
        needs(estimate, setting, H100)
        for setting in (
            Setting(),
            Setting("ddp", gpus),
            Setting("fsdp", gpus),
            Setting("fsdp", 2 * gpus),
            Setting("fsdp", gpus, cpu_offload=True),
        )
    )
    assert wider.held["weights"] < sharded.held["weights"] < ddp.held["weights"] == single.held["weights"]
    assert sharded.held["weights"] * gpus == pytest.approx(
        single.held["weights"] + (gpus - 1) * (single.held["weights"] - estimate.weights.base)
    )
    assert offloaded.held["weights"] < sharded.held["weights"] and offloaded.main_memory > 0
    assert ddp.flops == sharded.flops == single.flops
    assert ddp.held["gradients"] > single.held["gradients"]
    if regime == "finetune":
        assert sharded.held["optimizer"] == pytest.approx(single.held["optimizer"] / gpus)
        assert offloaded.held["optimizer"] == 0


def test_a_quantised_base_is_a_half_and_a_quarter(trained):
    plain, int8, nf4 = (
        needs(trained["retrofit"], Setting(quantization=name), H100).held["weights"] for name in ("none", "int8", "nf4")
    )
    linear = trained["retrofit"].weights.linear / 2  # held in float32 here, of which QUANTIZED counts 16 bits
    assert plain - int8 == pytest.approx(1.5 * linear)
    assert int8 - nf4 == pytest.approx(linear * (0.5 - 4.5 / 16))
    assert not any(s.quantization != "none" for s in candidates(Case(regime="full").config, 8))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 64))
def test_a_step_is_shared_evenly(batch, accumulate, gpus):
    config = Case(batch=batch, accumulate=accumulate).config
    blocks = sequences(config, gpus)
    assert blocks % gpus == blocks % batch == 0 and blocks >= batch * accumulate
    assert blocks == batch * accumulate or batch * accumulate % gpus
    assert blocks - batch * accumulate < batch * gpus


@given(st.integers(1, 2000))
def test_whole_nodes_of_gpus(most):
    counts = sizes(most)
    assert counts[0] == 1 and counts[-1] <= most and counts == sorted(counts)
    assert all(count <= 8 or count % 8 == 0 for count in counts)


def changed(config, overrides):
    """The configuration with "trainer.batch_size=1 plan.gpus=2" and the like put into it."""
    for override in overrides.split():
        group, setting = override.split(".")
        section = OmegaConf.merge(OmegaConf.structured(getattr(config, group)), OmegaConf.from_dotlist([setting]))
        config = replace(config, **{group: OmegaConf.to_object(section)})
    return config


def test_a_refused_run_fits_with_what_the_refusal_names():
    """Every remedy is tried: the settings it names are put into the configuration."""
    estimate = tiny_estimate("llama", batch_size=2)
    config = replace(estimate.config, plan=PlanConfig(name="plan", gpus=1))
    small = replace(H100, memory=0.95 * needs(estimate, Setting(), H100).total / GIB)  # of which 90 % are usable
    refused = plan_run("run", Estimate(config, estimate.prepare), small)
    assert refused.error is not None and "do not fit" in refused.error
    remedies = refused.error.split(" Use ")[1].split("; or ")
    assert len(remedies) == 3 and remedies[0].startswith("trainer.batch_size=1 ")
    for remedy in remedies:
        again = plan_run("run", Estimate(changed(config, remedy.partition(" (")[0]), estimate.prepare), small)
        assert again.error is None, remedy


def test_hours_are_a_limit_that_more_gpus_can_keep():
    estimate = tiny_estimate("llama")
    hours = plan_run("run", estimate, H100).chosen.seconds / 3600
    halved = replace(estimate.config, plan=PlanConfig(name="plan", hours=hours / 2))
    assert plan_run("run", Estimate(halved, estimate.prepare), H100).chosen.setting.gpus == 2
    alone = replace(halved, plan=replace(halved.plan, gpus=1))
    refused = plan_run("run", Estimate(alone, estimate.prepare), H100)
    assert "plan.hours" in refused.error and "plan.gpus=2" in refused.error
    # what it adds trains on twice as many tokens, in the time that was too long
    assert "(2 blocks a step instead of 1: regime.steps / 2 reads as much)" in refused.error


def test_what_the_configuration_fixes_stays():
    for changes, expected in (
        ({"strategy": "fsdp", "devices": 4}, ("fsdp", 4)),
        ({"devices": 2}, ("ddp", 2)),
        ({"devices": 8, "num_nodes": 2, "strategy": "fsdp"}, ("fsdp", 16)),
        ({"strategy": "fsdp", "cpu_offload": True}, ("fsdp", 1)),
    ):
        setting = plan_run("run", tiny_estimate("llama", **changes), H100).chosen.setting
        assert (setting.strategy, setting.gpus) == expected
    with pytest.raises(UserError, match=r"trainer.strategy=auto on 8 x 1 GPUs"):
        estimate = tiny_estimate("llama", devices=8)
        plan_run("run", Estimate(replace(estimate.config, plan=PlanConfig(name="p", gpus=4)), estimate.prepare), H100)


def test_layouts_are_each_on_the_fewest_gpus(trained):
    estimate = trained["retrofit"]
    small = replace(H100, memory=needs(estimate, Setting(), H100).total / GIB)
    for need in layouts(estimate, small, 64):
        fewer = replace(need.setting, gpus=need.setting.gpus // 2)
        if need.total <= small.usable and fewer.gpus > 1 and need.setting.strategy == "fsdp":
            assert needs(estimate, fewer, small).total > small.usable


TINY = ["job=plan", "model=tiny_llama", "data.block_size=64", "eval.window=64", "attention.warm_start_blocks=2"]


def test_plan_downloads_and_writes_nothing(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the network is not for plans")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", refuse)
    unknown = run("+experiment=retrofit_124m", *TINY, "model.hub_id=nobody/nothing")
    assert unknown.code == 2 and "give the folder of its config.json as model.path" in unknown.err
    result = run("+experiment=retrofit_124m", *TINY)
    assert result.code == 0, result.err
    first, *lines = result.out.splitlines()
    assert first.startswith("plan of retrofit_124m: retrofit of tiny_llama with focus, 60 steps (router)")
    assert "40 % of that arithmetic" in result.out and "fits 1 h100 (single)" in lines[-1]
    assert not list(tmp_path.iterdir())


def test_plan_refuses_with_exit_code_2(monkeypatch):
    monkeypatch.setitem(GPUS, "h100", replace(H100, memory=2e-4))
    result = run("+experiment=retrofit_124m", *TINY, "plan.gpus=1")
    assert result.code == 2 and result.err.startswith("error: tiny_llama: ") and "Use " in result.err
    assert "plan of retrofit_124m" in result.out  # with its table, which says what it would take


@pytest.mark.slow
def test_every_arm_has_a_line():
    result = run("+experiment=full_training", *TINY)
    assert result.code == 0, result.err
    assert "plan of full_training: 5 runs" in result.out
    lines = [line.split() for line in result.out.splitlines() if line.startswith("│")]
    assert [line[1] for line in lines] == ["focus", "full", "full_same_steps", "random_same_steps", "focus_paper"]
    shared = run("+experiment=full_training", *TINY, "every_arm=['model=tiny_gpt2']")
    others = [line.split() for line in shared.out.splitlines() if line.startswith("│")]
    assert len(others) == 5 and all(a[3] != b[3] for a, b in zip(lines, others, strict=True))  # parameters


def test_models_are_planned_in_the_setting_of_the_paper():
    command = ["job=plan", "plan.models=[tiny_llama,tiny_gpt2]", "data.block_size=64", "eval.window=64"]
    result = run(*command, "attention.warm_start_blocks=0", "plan.paper=true")
    assert result.code == 0, result.err
    assert "tiny_llama fits" in result.out and "tiny_gpt2 fits" in result.out


def test_without_training_a_forward_pass_is_planned():
    result = run(*TINY, "regime=none")
    assert result.code == 0, result.err
    assert "no training" in result.out.splitlines()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["plan.gpu=h1000"], "plan.gpu=h1000 is not one of"),
        (["plan.utilization=2"], "plan.utilization=2.0 is impossible"),
        (["data.block_size=1024"], "data.block_size=1024 exceeds the 512 positions of tiny_llama"),
        (["attention=magicpig", "regime=none"], "attention=magicpig decides by what it reads"),
        (["model.quantization=nf4", "trainer.strategy=fsdp"], "quantization with a frozen base"),
    ],
)
def test_bad_plans_are_refused(changes, message):
    result = run(*fitting(*TINY, *changes))
    assert result.code == 2 and message in result.err


def test_an_architecture_that_would_be_downloaded_is_refused():
    config = replace(Case().config, model=ModelConfig(name="model", hub_id="nobody/nothing"))
    with pytest.raises(UserError, match="downloads nothing"):
        estimate_of(Case(), config)


def test_gpus_are_described_in_full():
    for name, gpu in GPUS.items():
        assert gpu.name == name and gpu.source and gpu_named(name) is gpu
        assert 0 < gpu.usable < gpu.memory * GIB and gpu.float32 < gpu.bf16 and gpu.host <= gpu.link


@pytest.mark.slow
def test_the_whole_zoo_in_4_gib():
    command = [sys.executable, "-m", "focus_exp", "job=plan", "plan=zoo"]
    script = f"""
import json, resource, subprocess
done = subprocess.run({json.dumps(command)}, capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([done.returncode, done.stdout, peak]))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    code, out, peak = json.loads(ran.stdout)
    assert code == 0 and peak < 4 * GIB
    zoo = [path.stem for path in ZOO.glob("*.yaml") if "hub_id:" in path.read_text()]
    assert len(zoo) > 10 and all(f"{name} fits" in out for name in zoo)


def test_experiments_are_planned_in_one_table_that_is_written(tmp_path):
    planned = "plan.experiments=[retrofit_124m,full_training]"
    result = run(*tiny(tmp_path), "job=plan", "plan=experiments", planned, "scale=quick", "regime.tune.factors=[1,2]")
    assert result.code == 0, result.err
    text = (tmp_path / "runs" / "records" / "plans.csv").read_text(encoding="utf-8")
    found = {(line["experiment"], line["arms"]): line for line in csv.DictReader(io.StringIO(text))}
    assert [name for name, _ in found] == ["retrofit_124m", *["full_training"] * 5]
    for line in found.values():
        hours = int(line["runs"]) * int(line["gpus"]) * float(line["hours"])
        assert line["error"] == "" and float(line["gpu_hours"]) == pytest.approx(hours) and float(line["held"]) > 0
        assert int(line["runs"]) == 3  # the run and two tries
    steps = {name: int(line["tokens"]) for (_, name), line in found.items()}
    assert steps["full"] == 5 / 2 * steps["focus"]  # without the blocks of fitting and balancing
    assert "GPU hours of one seed" in (tmp_path / "runs" / "records" / "plans.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ((), True),
        (("attention.groups=8", "regime.phases.router.learning_rate=1"), True),
        (("regime.phases.router.aim=base",), False),
        (("regime.phases.router.steps=7",), False),
        (("regime.tune.factors=[1,2,3]",), False),
        (("trainer.precision=float32",), False),
    ],
)
def test_arms_are_planned_once_if_they_need_the_same(changes, alike):
    assert (needs_of(parse(composed(*changes))) == needs_of(parse(composed()))) is alike
