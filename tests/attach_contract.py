"""Check the contract of `attach` on one tiny random architecture: exact, off means off, every path alike."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tiny_architectures import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.errors import UserError
from focus_exp.models.attach import attach, detach
from focus_exp.models.methods import attached_methods, disable_method, set_routing

BATCH, LENGTH, GROUPS = 3, 44, 4
# (top_k, window): every pair is in the window, every pair shares a group, or pairs are pruned
ROUTINGS = {"all kept": (1, LENGTH), "all groups": (GROUPS, 4), "hard groups": (1, 4)}
CHUNKS = [0, 20, 36, *range(LENGTH - 4, LENGTH + 1)]  # a prefill, two chunks, then token by token
PADDING = [0, 5, 17]  # tokens of padding in each sequence
PROMPTS = ("no mask", "left")  # for generate()
NEW_TOKENS = 4
TOLERANCE = 1e-5
MIN_CHANGE = 1e-3  # hard groups that change less would test nothing
FAILURES = ("crash", "wrong")


@dataclass
class Row:
    name: str
    outcome: str
    kind: str = ""
    attached: int = 0
    layers: int = 0
    error: float = 0.0
    why: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Input:
    tokens: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def real(self) -> Tensor:
        return torch.ones_like(self.tokens).bool() if self.mask is None else self.mask.bool()

    def arguments(self, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        options = {"input_ids": self.tokens[:, start:stop]}
        if self.mask is not None:
            options["attention_mask"] = self.mask[:, :stop]
        if self.positions is not None:
            options["position_ids"] = self.positions[:, start:stop]
        return options


def make_inputs(model: PreTrainedModel) -> dict[str, Input]:
    tokens = torch.randint(10, 200, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(LENGTH) < torch.tensor(PADDING)[:, None]
    left, right = (~padding).long(), (~padding.flip(1)).long()
    inputs = {
        "no mask": Input(tokens), "ones": Input(tokens, torch.ones_like(tokens)),
        "left": Input(tokens * left, left), "right": Input(tokens * right, right),
    }  # fmt: skip
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["left, positions"] = Input(tokens * left, left, (left.cumsum(1) - 1).clamp(min=0))
    return inputs


def run_full(model: PreTrainedModel, x: Input) -> Tensor:
    return model(**x.arguments(), use_cache=False).logits[x.real]


def run_cached(model: PreTrainedModel, x: Input) -> Tensor:
    cache, logits = None, []
    for start, stop in pairwise(CHUNKS):
        out = model(**x.arguments(start, stop), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        assert cache is not None, "no cache came back"
        logits.append(out.logits)
    return torch.cat(logits, dim=1)[x.real]


def generate(model: PreTrainedModel, x: Input) -> Tensor:
    """Generate with a cache and without, which must be equal."""
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    outputs = [model.generate(x.tokens, attention_mask=x.mask, use_cache=cache, **options) for cache in (True, False)]
    assert torch.equal(*outputs), "another text with its cache"
    return outputs[0]


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the largest difference over the largest of b; infinite where a value is NaN."""
    return float(torch.nan_to_num((a - b).abs().max() / b.abs().max(), nan=float("inf")))


class Checks:
    """Problems of one attached architecture, by kind."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.attached = 0
        self.error = 0.0
        self.why: dict[str, list[str]] = {kind: [] for kind in ("crash", "wrong", "refuses", "base itself")}

    def compute(self, name: str, function: Callable[..., Tensor], x: Input, base: bool = False) -> Tensor | None:
        """Return function(model, x); None where it fails, of which the base itself is no fault of ours."""
        try:
            result = function(self.model, x)
            assert result.isfinite().all(), "not finite"
            return result
        except UserError as error:
            self.why["refuses"].append(f"{name}: {error}")
        except Exception as error:
            kind = "wrong" if isinstance(error, AssertionError) else "crash"
            self.why["base itself" if base else kind].append(f"{name}: {describe_error(error)}")
        return None

    def compare(
        self, name: str, function: Callable[..., Tensor], x: Input, expected: Tensor | None, tolerance: float = 0.0
    ) -> None:
        result = None if expected is None else self.compute(name, function, x)
        if result is None or expected is None or torch.equal(result, expected):
            return
        error = relative_error(result, expected) if tolerance else float("inf")
        self.error = max(self.error, error if error <= tolerance else 0.0)
        if error > tolerance:
            self.why["wrong"].append(f"{name}: {error:.1e}" if tolerance else f"{name}: not the same")

    def run(self) -> str:
        """Return the outcome."""
        model, inputs = self.model, make_inputs(self.model)
        base = {mask: self.compute(mask, run_full, x, base=True) for mask, x in inputs.items()}
        inputs = {mask: x for mask, x in inputs.items() if base[mask] is not None}
        if not inputs:
            return "unbuilt"
        caches, texts = {}, {}
        for mask, x in inputs.items():
            logits = self.compute(f"cache, {mask}", run_cached, x, base=True)
            if logits is not None and (error := relative_error(logits, base[mask])) > TOLERANCE:
                self.why["base itself"].append(f"cache, {mask}: not its full forward: {error:.1e}")
            elif logits is not None:
                caches[mask] = logits
            if mask in PROMPTS:
                texts[mask] = self.compute(f"generate, {mask}", generate, x, base=True)
        torch.manual_seed(0)
        try:
            attach(model, "focus", window=4, sinks=2, groups=GROUPS)
        except UserError as error:
            self.why["refuses"].append(str(error))
            return "refused"
        except Exception as error:
            self.why["crash"].append(f"attach: {describe_error(error)}")
            return "crash"
        self.attached = len(attached_methods(model))
        for mask, x in inputs.items():
            self.compare_paths(mask, x, base[mask], mask in caches, texts.get(mask))
            with disable_method(model):
                self.compare(f"off, {mask}", run_full, x, base[mask])
                self.compare(f"off, cache, {mask}", run_cached, x, caches.get(mask))
        detach(model)
        for mask, x in inputs.items():
            self.compare(f"detached, {mask}", run_full, x, base[mask])
        return next((kind for kind in FAILURES if self.why[kind]), "partly" if self.why["refuses"] else "exact")

    def compare_paths(self, mask: str, x: Input, base: Tensor, has_cache: bool, text: Tensor | None) -> None:
        for routing, (top_k, window) in ROUTINGS.items():
            set_routing(self.model, hard=True, top_k=top_k, backend="masked")
            for method in attached_methods(self.model).values():
                method.window, method.sparse_from = window, 0
            expected: Tensor | None = base
            if routing != "hard groups":
                self.compare(f"{routing}, masked, {mask}", run_full, x, base, TOLERANCE)
            else:
                expected = self.compute(f"{routing}, masked, {mask}", run_full, x)
                if expected is not None and relative_error(expected, base) < MIN_CHANGE:
                    self.why["wrong"].append(f"{routing}, {mask}: no pair is pruned")
            if has_cache:
                self.compare(f"{routing}, cache, {mask}", run_cached, x, expected, TOLERANCE)
            if text is not None and routing != "hard groups":
                self.compare(f"{routing}, generate, {mask}", generate, x, text)
            elif text is not None:
                self.compute(f"{routing}, generate, {mask}", generate, x)
            set_routing(self.model, hard=True, backend="auto")
            self.compare(f"{routing}, sparse, {mask}", run_full, x, expected, TOLERANCE)


def describe_error(error: Exception) -> str:
    """Return the first line of an error, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} ({Path(frame.filename).name}, {frame.name})"


@torch.no_grad()
def examine(name: str) -> Row:
    try:
        model = tiny_model(name)
    except Exception as error:
        return Row(name, "unbuilt", why=[f"no tiny configuration: {describe_error(error)}"])
    checks = Checks(model)
    outcome = checks.run()
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    kinds = ("refuses",) if outcome == "refused" else tuple(checks.why)
    why = [
        text if kind in FAILURES or outcome == "refused" else f"{kind}: {text}"
        for kind in kinds
        for text in checks.why[kind]
    ]
    return Row(name, outcome, type(model).__name__, checks.attached, layers, checks.error, why)
