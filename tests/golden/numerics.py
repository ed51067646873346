# ruff: noqa: E402  run as a script, it finds the package and the other builders itself
"""Golden numbers: logits of tiny models, losses of tiny runs, config hashes of the committed records.

python tests/golden/numerics.py          compare with numerics.json, rtol 1e-5
python tests/golden/numerics.py --exact  compare bit for bit, on the machine that wrote the file
python tests/golden/numerics.py --write  write numerics.json
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from builders import load_recorded, scored, write_variants
from conftest import FAMILIES, build
from omegaconf import OmegaConf
from running import fitting, only_run, router_steps, run, tiny
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp import attach, set_routing
from focus_exp.config_hash import config_hash
from focus_exp.renames import upgrade_keys
from focus_exp.results.metrics import read_metrics
from focus_exp.results.record import Record
from focus_exp.training.callbacks import Checkpoint

GOLDEN = Path(__file__).with_suffix(".json")
RTOL = 1e-5
SAMPLES = 64
NEAR = {"window": 6, "sinks": 2}
# variant -> method, its options, routing
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "soft": ("focus", {"groups": 4}, {"hard": False}),
    "hard": ("focus", {"groups": 4}, {"hard": True}),
    "share": ("focus", {"groups": 4}, {"hard": True, "top_k": 2, "pair_rule": "share"}),
    "window": ("window", {}, None),
    "focus_dual": ("focus_dual", {"groups": 4, "top_k": 2}, {"hard": True}),
}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the package handles it."""


def tiny_attached(family: str, method: str, options: dict[str, Any], routing: dict[str, Any] | None) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(f"tiny_{family}")
        torch.manual_seed(1)
        attach(model, method, **NEAR, **options)
    return set_routing(model, **routing) if routing else model


def tokens(batch: int = 2, length: int = 40) -> Tensor:
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(0))


def describe(logits: Tensor) -> dict[str, Any]:
    """Digest and evenly spaced values of float32 `logits`."""
    flat = logits.float().flatten()
    index = torch.linspace(0, len(flat) - 1, SAMPLES).long()
    return {"sha256": hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16], "values": flat[index].tolist()}


@torch.no_grad()
def compute_logits() -> dict[str, Any]:
    computed = {}
    for family in FAMILIES:
        for name, (method, options, routing) in VARIANTS.items():
            model = tiny_attached(family, method, options, routing)
            computed[f"{family}/{name}"] = describe(model(tokens(), use_cache=False).logits)
            if name == "hard":
                computed[f"{family}/decode"] = describe(decode(model, tokens(), prompt=24))
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
        "focus_dual": ["attention=focus_dual", "attention.calibration_sequences=3", "attention.validation_sequences=1",
                       "attention.fit_steps=4", "attention.top_k=1", "recipe=none"],
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
        patch.setattr(Checkpoint, "on_train_batch_end", die_at_step(3))
        execute(folder, "resumed", *resumed)
    execute(folder, "resumed", *resumed)
    computed["resumed"] = losses_of(only_run(folder / "resumed"))
    return computed


def die_at_step(step: int) -> Callable[..., None]:
    """`Checkpoint.on_train_batch_end` that raises after optimizer step `step`, before the checkpoint is saved."""
    original = Checkpoint.on_train_batch_end

    def on_train_batch_end(self: Checkpoint, trainer: Any, *args: Any) -> None:
        if trainer.global_step == step:
            raise Killed
        original(self, trainer, *args)

    return on_train_batch_end


def execute(folder: Path, runs: str, *overrides: str) -> None:
    result = run(*fitting(*tiny(folder, runs), *overrides))
    assert result.code == 0, result.err


def compute_config_hashes(every: int = 1) -> dict[str, str]:
    """Hash the stored config of every `every`-th committed run, by `<started> <variant> <recorded hash>`.

    Comparisons of inline variants are left out: variants are files since, and the hash is over their names. Adapters of
    published runs are read from where moved.csv says that they are now.
    """
    keyed, records = {}, ROOT / "runs" / "records"
    with (records / "moved.csv").open(encoding="utf-8") as file:
        moved = {f"runs/records/{row['before']}/": f"runs/records/{row['now']}/" for row in csv.DictReader(file)}
    for path in records.rglob("record.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if adapter := record["config"].get("adapter"):
            folder = adapter.removesuffix("adapter")
            record["config"]["adapter"] = f"{moved.get(folder, folder)}adapter"
        config = record["config"]
        if config and (config["job"] != "compare" or config.get("variants")):
            keyed[f"{record['started']} {config['variant'] or '-'} {record['config_hash']}"] = config
    return {
        key: config_hash(OmegaConf.to_object(load_recorded(upgrade_keys(keyed[key])))) for key in sorted(keyed)[::every]
    }


def compute(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"logits": compute_logits(), "losses": compute_losses(folder), "config_hashes": compute_config_hashes()}


def differences(golden: Any, computed: Any, exact: bool = False, key: str = "") -> Iterator[str]:
    """Keys whose values differ; floats by more than RTOL unless `exact`; digests only if `exact`."""
    if isinstance(golden, dict) and isinstance(computed, dict):
        for name in sorted({*golden, *computed}):
            if name == "sha256" and not exact:
                continue
            if name not in golden or name not in computed:
                yield f"{key}/{name}: only in {'golden' if name in golden else 'computed'}"
                continue
            yield from differences(golden[name], computed[name], exact, f"{key}/{name}")
    elif isinstance(golden, list) and isinstance(computed, list) and len(golden) == len(computed):
        for index, pair in enumerate(zip(golden, computed, strict=True)):
            yield from differences(*pair, exact, f"{key}[{index}]")
    elif isinstance(golden, float) and isinstance(computed, float) and not exact:
        if not math.isclose(golden, computed, rel_tol=RTOL, abs_tol=5e-6):
            yield f"{key}: {golden} -> {computed}"
    elif golden != computed:
        yield f"{key}: {golden} -> {computed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exact", action="store_true", help="bit for bit")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        computed = compute(Path(folder))
    if options.write:
        GOLDEN.write_text(json.dumps(computed, indent=1) + "\n", encoding="utf-8")
        return 0
    changed = list(differences(json.loads(GOLDEN.read_text(encoding="utf-8")), computed, options.exact))
    print("\n".join(changed) or f"equal: {GOLDEN.relative_to(ROOT)}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
