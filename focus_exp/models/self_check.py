"""Before a method is trusted with a model: with every pair kept, the attached model is its base, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.errors import UserError, first_line
from focus_exp.models.hooks import has_values
from focus_exp.models.methods import attached_methods, disable_method, execution_device, offload_hooks, swap_methods

log = logging.get_logger(__name__)

LENGTH = 12
PADDING = 3  # of the second text
STEPS = (LENGTH - 3, 2, 1)
# relative; rounding in half precision adds up over the layers, a rule that was not understood shows in every token
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE = 0.1
VERIFIED: set[str] = set()  # architectures, by class and configuration


def check_exact(model: PreTrainedModel) -> None:
    """UserError that names model and reason unless the attached layers can stand in for the model's own.

    Two short texts, one padded on the left, go through the base and through the attached model with every pair kept:
    by masks, by the sparse path and through the cache; once for an architecture. Then through the method itself. Not
    where weights are not there yet (on the meta device, unless accelerate's hooks load them), nor where they are
    sharded, which a warning says.
    """
    parameters, methods = list(model.parameters()), attached_methods(model)
    if any(isinstance(p, DTensor) for p in parameters):
        log.warning_once("attach: sharded parameters, so exactness is not checked; attach before fully_shard to check")
        return
    loaded = any(getattr(hook, "offload", False) for hook in offload_hooks(model))
    if not loaded and not all(has_values(p) for p in parameters):
        return
    dtypes = sorted({str(p.dtype) for p in parameters})
    known = f"{type(model).__qualname__} {sorted(methods)} {dtypes} {loaded} {model.config}"
    with torch.no_grad(), evaluating(model):
        if known not in VERIFIED:
            compare(model)
            VERIFIED.add(known)
        few = slice(PADDING + 2)
        tokens, mask = (x[:, few] for x in texts(model))
        attempt(f"{type(model).__name__} cannot take this attention method", partial(logits, model, tokens, mask))
    for method in methods.values():
        method.path = None


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Within the block no module is in training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def compare(model: PreTrainedModel) -> None:
    name, methods = type(model).__name__, attached_methods(model)
    tokens, padded = texts(model)
    compute = partial(attempt, f"{name} itself fails on token ids")
    with disable_method(model):
        mask, whole = padded, compute(partial(logits, model, tokens, padded))
        # some give NaN where a whole row is padding, as eager in float64; a scale of all activations (dynamic int8)
        # depends on what is under the padding
        other = compute(partial(logits, model, tokens.where(padded.bool(), tokens + 1), padded))
        limit = TOLERANCE.get(whole.dtype, COARSE)
        if not difference(other, whole, padded, limit) < limit:
            mask = torch.ones_like(padded)
            whole = compute(partial(logits, model, tokens, mask))
            limit = COARSE  # such activations are rounded, too
    if not whole[mask.bool()].isfinite().all():
        raise UserError(f"{name} itself gives NaN or infinity for token ids; look at its weights")
    for way, backend, steps in (
        ("by masks", "masked", None),
        ("by the sparse path", "math", None),
        ("through the cache", "masked", STEPS),
    ):
        refused = f"{name} cannot take an attached method {way}"
        everything: dict[int, AttentionMethod] = {
            index: WindowOnly.create(method.shape, window=LENGTH, sinks=0) for index, method in methods.items()
        }
        with swap_methods(model, everything):
            for method in everything.values():
                method.backend = backend
            found = attempt(refused, partial(logits, model, tokens, mask, steps))
        error = difference(found, whole, mask, limit)
        if error >= limit and steps:  # some models' own caches are not exact
            with disable_method(model):
                error = difference(found, attempt(refused, partial(logits, model, tokens, mask, steps)), mask, limit)
        if error >= limit:
            raise UserError(
                f"{refused}: with every pair kept its logits differ from the base's by {error:.1e} of their size, so "
                "its attention has a rule that is not known here"
            )
        if idle := [index for index, method in everything.items() if method.path is None]:
            raise UserError(f"{refused}: layers {idle} do not call it; leave them out with layers=[...]")


def texts(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Tokens and mask `[2, T]`."""
    size = model.config.get_text_config().vocab_size
    tokens = torch.randint(size // 4, size // 2, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :PADDING] = 0
    device = execution_device(model)
    return tokens.to(device), mask.to(device)


def logits(model: PreTrainedModel, tokens: Tensor, mask: Tensor, steps: tuple[int, ...] | None = None) -> Tensor:
    """`[2, T, V]`, in one pass or in `steps` through a cache."""
    # without the experts' losses, for which a base itself fails when there are tokens in its cache
    options = {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
    if steps is None:
        found: Tensor = model(input_ids=tokens, attention_mask=mask, use_cache=False, **options).logits
        return found
    cache, parts, end = None, [], 0
    for part in tokens.split(list(steps), 1):
        end += part.shape[1]
        out = model(input_ids=part, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True, **options)
        cache = out.get("past_key_values")
        if cache is None:
            raise UserError("it hands back no key/value cache")
        parts.append(out.logits)
    return torch.cat(parts, 1)


def attempt(refused: str, compute: Callable[[], Tensor]) -> Tensor:
    """What it computes; UserError with the reason, whatever a model's own code made of it."""
    try:
        return compute()
    except Exception as error:
        reason = first_line(error) if str(error) else type(error).__name__
        raise UserError(f"{refused}: {reason}") from error


def difference(found: Tensor, expected: Tensor, mask: Tensor, limit: float) -> float:
    """Largest difference of logits, relative to the largest. Under a coarse limit of the typical token of a text: an
    expert that rounding has chosen changes some."""
    each = (found - expected).abs().amax(-1).float() / expected[mask.bool()].abs().max().float()
    rows = [row[real.bool()] for row, real in zip(each, mask, strict=True)]
    worst = [row.median() if limit == COARSE else row.max() for row in rows]
    return float(torch.stack(worst).nan_to_num(float("inf")).max())
