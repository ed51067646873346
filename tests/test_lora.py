"""LoRA and full fine-tuning as baselines: initial logits, parameter counts, training, resume."""

import json
import signal

import pytest
import torch
from builders import Killed, compute_logits, scored, stop_training
from conftest import build
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from running import fitting, only_run, outcome, record_of, router_steps, run, tiny
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from focus_exp import freeze
from focus_exp.config import LoraConfig
from focus_exp.errors import UserError
from focus_exp.models.lora import (
    add_lora,
    count_router_parameters,
    describe_lora,
    save_lora,
)
from focus_exp.training.module import LanguageModelTask

LINEAR = {
    "gpt2": ["c_attn", "attn.c_proj", "c_proj", "c_fc", "lm_head"],
    "llama": ["q_proj", "v_proj", "self_attn.o_proj", "down_proj", "gate_proj"],
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
ROUTER, EVERYTHING = router_steps(5), "recipe.phases.everything.steps=5"
LORA = ("recipe=lora", "attention=full", "recipe.phases.lora.steps=5", "recipe.phases.lora.learning_rate=1e-2")
REGIMES = {
    "none": ("recipe=none", "attention=full"),
    "retrofit": (ROUTER,),
    "lora": LORA,
    "matched": (*LORA, "recipe.lora.rank=null"),
    "window": (*LORA, "attention=window"),
    "routing": (*LORA, "attention=routing_transformer", "attention.centroid_decay=0.9"),
    "finetune": ("recipe=finetune", "attention=full", ROUTER, EVERYTHING),
}


def adapted(model, budget: int = 0, seed: int = 0, **options):
    torch.manual_seed(seed)
    return add_lora(model, LoraConfig(**options), budget)


def trained(model) -> dict[str, torch.nn.Parameter]:
    names = freeze(model, "lora")
    return {name: parameter for name, parameter in model.named_parameters() if name in names}


@torch.no_grad()
def shake(model) -> None:
    """Replace zeros by random values, as training would."""
    torch.manual_seed(3)
    for parameter in trained(model).values():
        parameter += 0.1 * torch.randn_like(parameter)


def count(model) -> int:
    return sum(parameter.numel() for parameter in trained(model).values())


def full_size(name: str):
    with torch.device("meta"):
        return build(name)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@DTYPES
def test_add_lora_initial_logits_equal_base(tiny_model, family, dtype):
    model = tiny_model(family, dtype=dtype)
    before = compute_logits(model)
    adapted(model)
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    assert torch.equal(compute_logits(model), before)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("rank", "alpha"), [(4, None), (2, 3)])
def test_lora_forward_equals_the_papers_equation(tiny_model, family, rank, alpha):
    model, twin = (tiny_model(family, dtype=torch.float64) for _ in range(2))
    shake(adapted(model, rank=rank, alpha=alpha, target_modules=LINEAR[family][:3]))
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            part = twin.get_submodule(name)
            conv = isinstance(part, Conv1D)  # which holds its weights transposed
            w = part.weight.data.T if conv else part.weight.data  # [out, in]
            a, b = (getattr(layer, f"lora_{matrix}")["default"].weight.data.double() for matrix in "AB")
            w = w + (alpha or 2 * rank) / rank * b @ a
            part.weight.data = w.T if conv else w
    torch.testing.assert_close(compute_logits(model), compute_logits(twin), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@given(budget=st.integers(0, 30_000))
@settings(max_examples=4)
def test_add_lora_rank_is_nearest_to_the_budget(family, budget):
    model = adapted(build(f"tiny_{family}"), budget, rank=None)
    rank = describe_lora(model)["rank"]
    others = [adapted(build(f"tiny_{family}"), rank=other) for other in (rank - 1, rank + 1) if other]
    assert abs(count(model) - budget) <= min(abs(count(other) - budget) for other in others)


def test_parameter_counts_equal_the_papers():
    for name, rank, expected in (
        *(("gpt2_124m", 4, 147_456), ("gpt2_124m", 16, 589_824)),
        *(("gpt2_124m", None, 147_456), ("mistral_7b_instruct", 4, 1_703_936)),
    ):
        assert count(adapted(full_size(name), budget=148_224, rank=rank)) == expected
    assert count_router_parameters(full_size("gpt2_124m"), 4, 16) == 148_224
    assert count_router_parameters(full_size("mistral_7b_instruct"), 2, 16) == 2_098_176


@pytest.mark.parametrize(("family", "there"), [("gpt2", "c_attn, c_fc, c_proj"), ("llama", "k_proj, lm_head, o_proj")])
@pytest.mark.parametrize("target", ["proj_q", "proj"])
def test_add_lora_unknown_target_raises_with_choices(tiny_model, family, there, target):
    with pytest.raises(UserError, match=f"target_modules.*{target}") as error:
        adapted(tiny_model(family), target_modules=["c_attn" if family == "gpt2" else "q_proj", target])
    assert there in str(error.value)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@DTYPES
def test_save_lora_loads_with_peft(tiny_model, tmp_path, family, dtype):
    model = tiny_model(family, dtype=dtype)
    shake(adapted(model))
    save_lora(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    loaded = PeftModel.from_pretrained(tiny_model(family, dtype=dtype), tmp_path)
    assert torch.equal(compute_logits(loaded), compute_logits(model))
    with loaded.disable_adapter():
        assert torch.equal(compute_logits(loaded), compute_logits(tiny_model(family, dtype=dtype)))


def command(folder, name, *more):
    return fitting(*tiny(folder, name), "trainer.checkpoint_every=2", "eval.max_sequences=2", *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def seen(folder):
    """One run of every recipe, below `folder`, and the batches that each was trained on."""
    batches = {}

    step = LanguageModelTask.training_step
    for name, overrides in REGIMES.items():
        kept = batches[name] = []

        def recorded(self, batch, index, kept=kept):
            kept.append(batch["input_ids"].clone())
            return step(self, batch, index)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LanguageModelTask, "training_step", recorded)
            patch.setattr("focus_exp.runs.open.shutil.rmtree", lambda *_, **__: None)  # checkpoints stay
            result = run(*command(folder, name, *overrides))
        assert result.code == 0, result.err
    return batches


def test_recipes_train_on_the_same_batches(seen):
    wanted = torch.stack(seen["retrofit"])
    sequences = wanted.flatten(0, 1)
    assert wanted.shape[:2] == (5, 2 * 2) and len(sequences.unique(dim=0)) == len(sequences)
    for name in REGIMES.keys() - {"none"}:
        assert torch.equal(torch.stack(seen[name]), wanted), name


@pytest.mark.parametrize("name", REGIMES)
def test_recipes_compare_with_the_same_base(folder, seen, name):
    record, untouched = record_of(folder / name), record_of(folder / "none")
    (base,) = [row for row in scored(record.measurements) if row.kind == "base"]
    assert (base.nll, base.eval_tokens) == tuple(untouched.find(name, "base") for name in ("nll", "eval_tokens"))
    assert (record.model["fingerprint"], record.data) == (untouched.model["fingerprint"], untouched.data)
    for row in scored(record.measurements):
        assert row.error is None and row.eval_tokens == base.eval_tokens
        assert row.causal == (row.method != "routing_transformer")
        assert row.kind != "trained" or row.nll != base.nll


def test_records_name_and_count_what_was_trained(folder, seen):
    records = {name: record_of(folder / name) for name in REGIMES}
    said = {name: [(row.kind, row.name) for row in scored(record.measurements)[1:]] for name, record in records.items()}
    assert said["lora"] == [("trained", "lora_r4")]
    assert said["matched"] == [("trained", "lora_r5")]
    assert said["window"] == [("trained", "lora_r4"), ("control", "window")]
    assert said["finetune"] == [("trained", "trained")]
    counts = {name: record.method["trainable_parameters"] for name, record in records.items()}
    # two layers of 64 x 64 and 64 x 32; a router has 2 (64 + 2) 16
    assert counts == {
        **{"none": 0, "retrofit": 2112, "matched": 2 * 5 * 224},
        **dict.fromkeys(("lora", "window", "routing"), 2 * 4 * 224),
        **{"finetune": records["finetune"].model["parameters"]},
    }
    assert records["matched"].method | {"trainable_parameters": 0} == {
        **{"name": "lora_r5", "causal": True, "trainable_parameters": 0},
        **{"rank": 5, "alpha": 10, "target_modules": ["q_proj", "v_proj"]},
    }
    for record in records.values():
        assert record.steps == (5 if record.method["trainable_parameters"] else 0)


@pytest.mark.parametrize("name", ["lora", "matched", "window"])
def test_checkpoint_and_adapter_have_the_trained_part_alone(folder, seen, name):
    place = only_run(folder / name)
    assert not (place / "model").exists()
    saved = load_file(place / "adapter" / "adapter_model.safetensors")
    state = torch.load(place / "checkpoints" / "lora.ckpt", weights_only=True)["model"]
    renamed = {f"base_model.model.{key}".replace(".default", ""): tensor for key, tensor in state.items()}
    assert sum(t.numel() for t in saved.values()) == record_of(folder / name).method["trainable_parameters"]
    assert saved.keys() == renamed.keys() and all(torch.equal(saved[key], renamed[key]) for key in saved)
    assert all(tensor.abs().max() > 0 for tensor in saved.values())
    assert json.loads((place / "adapter" / "adapter_config.json").read_text())["r"] == (5 if name == "matched" else 4)


@pytest.mark.parametrize(
    ("name", "step", "signum"),
    [("lora", 4, None), ("routing", 3, signal.SIGTERM)],
    ids=["lora-killed", "routing-SIGTERM"],
)
def test_lora_interrupted_run_resumes_to_the_same_numbers(folder, seen, monkeypatch, name, step, signum):
    again = command(folder, f"{name}-{step}", *REGIMES[name])
    with monkeypatch.context() as patch:
        stop_training(patch, step, signum=signum)
        if signum:
            assert run(*again).code == 128 + signum
        else:
            with pytest.raises(Killed):
                run(*again)
    assert run(*again).code == 0
    assert outcome(folder / f"{name}-{step}") == outcome(folder / name)
