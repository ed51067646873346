"""Golden numbers: logits of tiny models, losses of tiny runs.

After a change that is meant to move them: REGENERATE=1 pytest -n 0 tests/test_golden_numerics.py, then read the diff.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Killed, compute_logits, make_tokens, scored, stop_training, write_variants
from conftest import FAMILIES, build
from running import fitting, only_run, router_steps, run, tiny
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp import attach, set_routing
from focus_exp.results.metrics import read_metrics
from focus_exp.results.record import Record

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "numerics.json"
SAMPLES = 64
NEAR = {"window": 6, "sinks": 2}
# variant -> method, its options, routing
PUBLISHED = {"groups": 4, "temperature": 0.1}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "soft": ("focus", PUBLISHED, {"hard": False}),
    "hard": ("focus", PUBLISHED, {"hard": True}),
    "share": ("focus", PUBLISHED, {"hard": True, "top_k": 2, "pair_rule": "share"}),
    "window": ("window", {}, None),
    "focus_dual": ("focus_dual", {"groups": 4, "top_k": 2}, {"hard": True}),
}


def tiny_attached(family: str, method: str, options: dict[str, Any], routing: dict[str, Any] | None) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(f"tiny_{family}")
        torch.manual_seed(1)
        attach(model, method, **NEAR, **options)
    return set_routing(model, **routing) if routing else model


def sample(logits: Tensor) -> dict[str, list[float]]:
    """Return evenly spaced values of float32 `logits`."""
    flat = logits.float().flatten()
    return {"values": flat[torch.linspace(0, len(flat) - 1, SAMPLES).long()].tolist()}


@torch.no_grad()
def compute_all_logits() -> dict[str, Any]:
    computed = {}
    for family in FAMILIES:
        for name, (method, options, routing) in VARIANTS.items():
            model = tiny_attached(family, method, options, routing)
            computed[f"{family}/{name}"] = sample(compute_logits(model))
            if name == "hard":
                computed[f"{family}/decode"] = sample(decode(model, make_tokens(), prompt=24))
    return computed


def decode(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
    """Logits `(B, T, V)` of a prefill of `prompt` tokens and of each next token with the cache."""
    outputs, cache = [], None
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
        outputs.append(output.logits)
        cache = output.past_key_values
    return torch.cat(outputs, 1)


def losses_of(folder: Path) -> dict[str, list[float]]:
    """Training loss of every step and evaluation loss of every row of the run in `folder`."""
    steps = [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    return {"train": steps, "eval": [row.nll for row in scored(Record.load(folder / "record.json").measurements)]}


def compute_losses(folder: Path) -> dict[str, Any]:
    """Losses of a retrofit, a LoRA, a comparison, and of a run that is killed and resumed."""
    computed = {}
    lora = ["attention=full", "recipe=lora", "recipe.steps=2"]
    for name, overrides in {
        "retrofit": [router_steps(2)],
        "lora": lora,
        "focus_dual": ["attention=focus_dual", "recipe.fit.sequences=3", "recipe.fit.validation_sequences=1",
                       "recipe.fit.steps=4", "attention.top_k=1", "recipe=none"],
    }.items():  # fmt: skip
        execute(folder, name, *overrides)
        computed[name] = losses_of(only_run(folder / name))
    arms = {"focus": ["recipe.steps=2"], "lora": lora, "window": ["attention=window", "recipe=none"]}
    execute(folder, "compare", "job=compare", *write_variants(folder / "conf", arms))
    for path in sorted((folder / "compare").rglob("record.json")):
        if arm := Record.load(path).config["variant"]:
            computed[f"compare/{arm}"] = losses_of(path.parent)
    resumed = ("trainer.checkpoint_every=2", router_steps(6))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_training(patch, 3, signum=None)
        execute(folder, "resumed", *resumed)
    execute(folder, "resumed", *resumed)
    computed["resumed"] = losses_of(only_run(folder / "resumed"))
    return computed


def execute(folder: Path, runs: str, *overrides: str) -> None:
    result = run(*fitting(*tiny(folder, runs), *overrides))
    assert result.code == 0, result.err


def compare(section: str, computed: dict[str, Any]) -> dict[str, Any]:
    """Return the golden numbers of a section, or write them where REGENERATE is set."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if os.environ.get("REGENERATE"):
        golden[section] = computed
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    return golden[section]


def test_logits_of_tiny_families_equal_golden():
    computed = compute_all_logits()
    golden = {name: {"values": row["values"]} for name, row in compare("logits", computed).items()}
    torch.testing.assert_close(computed, golden, rtol=1e-5, atol=5e-6)


def test_losses_of_tiny_runs_equal_golden(tmp_path):
    computed = compute_losses(tmp_path)
    torch.testing.assert_close(computed, compare("losses", computed), rtol=1e-5, atol=5e-6)
