"""What an attached model promises, examined on one tiny random architecture."""

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
# (top_k, window): every pair is kept for lying in the window, or for sharing a group, or not every pair is
WAYS = {"all kept": (1, LENGTH), "all groups": (GROUPS, 4), "hard groups": (1, 4)}
CUTS = [0, 20, 36, *range(LENGTH - 4, LENGTH + 1)]  # a prefill, two chunks, then token by token
SHORTER = [0, 5, 17]  # tokens of padding in each sequence
PROMPTS = ("no mask", "left")  # what text is generated from
NEW_TOKENS = 4
TOLERANCE = 1e-5
BLIND = 1e-3  # hard groups that change less would test nothing
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
        given = {"input_ids": self.tokens[:, start:stop]}
        if self.mask is not None:
            given["attention_mask"] = self.mask[:, :stop]
        if self.positions is not None:
            given["position_ids"] = self.positions[:, start:stop]
        return given


def inputs(model: PreTrainedModel) -> dict[str, Input]:
    tokens = torch.randint(10, 200, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(LENGTH) < torch.tensor(SHORTER)[:, None]
    left, right = (~padding).long(), (~padding.flip(1)).long()
    made = {
        "no mask": Input(tokens),
        "ones": Input(tokens, torch.ones_like(tokens)),
        "left": Input(tokens * left, left),
        "right": Input(tokens * right, right),
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        made["left, positions"] = Input(tokens * left, left, (left.cumsum(1) - 1).clamp(min=0))
    return made


def full(model: PreTrainedModel, given: Input) -> Tensor:
    return model(**given.arguments(), use_cache=False).logits[given.real]


def cached(model: PreTrainedModel, given: Input) -> Tensor:
    past, logits = None, []
    for start, stop in pairwise(CUTS):
        out = model(**given.arguments(start, stop), past_key_values=past, use_cache=True)
        past = out.past_key_values
        assert past is not None, "no cache came back"
        logits.append(out.logits)
    return torch.cat(logits, dim=1)[given.real]


def generated(model: PreTrainedModel, given: Input) -> Tensor:
    """The text that it continues with, the same with a cache and without."""
    texts = [
        model.generate(
            given.tokens, attention_mask=given.mask, use_cache=use_cache, do_sample=False,
            max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        )
        for use_cache in (True, False)
    ]  # fmt: skip
    assert torch.equal(*texts), "another text with its cache"
    return texts[0]


def difference(a: Tensor, b: Tensor) -> float:
    """Relative to the largest of b; infinite where something is no number."""
    return float(torch.nan_to_num((a - b).abs().max() / b.abs().max(), nan=float("inf")))


class Examination:
    """What one attached architecture keeps of the promises."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.attached = 0
        self.error = 0.0
        self.why: dict[str, list[str]] = {kind: [] for kind in ("crash", "wrong", "refuses", "base itself")}

    def computed(self, name: str, compute: Callable[[], Tensor], base: bool = False) -> Tensor | None:
        """None where it fails; that the model fails before anything is attached is not our fault."""
        try:
            result = compute()
            assert result.isfinite().all(), "not finite"
            return result
        except UserError as error:
            self.why["refuses"].append(f"{name}: {error}")
        except Exception as error:
            kind = "wrong" if isinstance(error, AssertionError) else "crash"
            self.why["base itself" if base else kind].append(f"{name}: {described(error)}")
        return None

    def check(self, name: str, compute: Callable[[], Tensor], wanted: Tensor | None, tolerance: float = 0.0) -> None:
        result = None if wanted is None else self.computed(name, compute)
        if result is None or wanted is None or torch.equal(result, wanted):
            return
        error = difference(result, wanted) if tolerance else float("inf")
        self.error = max(self.error, error if error <= tolerance else 0.0)
        if error > tolerance:
            self.why["wrong"].append(f"{name}: {error:.1e}" if tolerance else f"{name}: not the same")

    def examine(self) -> str:
        """The outcome."""
        model, given = self.model, inputs(self.model)
        base = {mask: self.computed(mask, lambda x=x: full(model, x), base=True) for mask, x in given.items()}
        given = {mask: x for mask, x in given.items() if base[mask] is not None}
        if not given:
            return "unbuilt"
        caches, texts = {}, {}
        for mask, x in given.items():
            logits = self.computed(f"cache, {mask}", lambda x=x: cached(model, x), base=True)
            if logits is not None and (error := difference(logits, base[mask])) > TOLERANCE:
                self.why["base itself"].append(f"cache, {mask}: not its full forward: {error:.1e}")
            elif logits is not None:
                caches[mask] = logits
            if mask in PROMPTS:
                texts[mask] = self.computed(f"generate, {mask}", lambda x=x: generated(model, x), base=True)

        torch.manual_seed(0)
        try:
            attach(model, "focus", window=4, sinks=2, groups=GROUPS)
        except UserError as error:
            self.why["refuses"].append(str(error))
            return "refused"
        except Exception as error:
            self.why["crash"].append(f"attach: {described(error)}")
            return "crash"
        self.attached = len(attached_methods(model))
        for mask, x in given.items():
            self.check_paths(mask, x, base[mask], mask in caches, texts.get(mask))
            with disable_method(model):
                self.check(f"off, {mask}", lambda x=x: full(model, x), base[mask])
                self.check(f"off, cache, {mask}", lambda x=x: cached(model, x), caches.get(mask))
        detach(model)
        for mask, x in given.items():
            self.check(f"detached, {mask}", lambda x=x: full(model, x), base[mask])
        return next((kind for kind in FAILURES if self.why[kind]), "partly" if self.why["refuses"] else "exact")

    def check_paths(self, mask: str, x: Input, base: Tensor, has_cache: bool, text: Tensor | None) -> None:
        model = self.model
        for what, (top_k, window) in WAYS.items():
            set_routing(model, hard=True, top_k=top_k, backend="masked")
            for method in attached_methods(model).values():
                method.window = window
            wanted: Tensor | None = base
            if what != "hard groups":
                self.check(f"{what}, masked, {mask}", lambda: full(model, x), base, TOLERANCE)
            else:
                wanted = self.computed(f"{what}, masked, {mask}", lambda: full(model, x))
                if wanted is not None and difference(wanted, base) < BLIND:
                    self.why["wrong"].append(f"{what}, {mask}: no pair is dropped")
            if has_cache:
                self.check(f"{what}, cache, {mask}", lambda: cached(model, x), wanted, TOLERANCE)
            if text is not None and what != "hard groups":
                self.check(f"{what}, generate, {mask}", lambda: generated(model, x), text)
            elif text is not None:
                self.computed(f"{what}, generate, {mask}", lambda: generated(model, x))
            set_routing(model, hard=True, backend="math" if softcap(model) else "cpu-flash")
            self.check(f"{what}, sparse, {mask}", lambda: full(model, x), wanted, TOLERANCE)


def softcap(model: PreTrainedModel) -> float | None:
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None)


def described(error: Exception) -> str:
    """The first line, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} ({Path(frame.filename).name}, {frame.name})"


@torch.no_grad()
def examine(name: str) -> Row:
    try:
        model = tiny_model(name)
    except Exception as error:
        return Row(name, "unbuilt", why=[f"no tiny configuration: {described(error)}"])
    found = Examination(model)
    outcome = found.examine()
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    shown = ("refuses",) if outcome == "refused" else tuple(found.why)
    why = [
        text if kind in FAILURES or outcome == "refused" else f"{kind}: {text}"
        for kind in shown
        for text in found.why[kind]
    ]
    return Row(name, outcome, type(model).__name__, found.attached, layers, found.error, why)
