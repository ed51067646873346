"""Check that an attached model that prunes nothing equals its base."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.errors import UserError, first_line
from focus_exp.models.masks import has_values
from focus_exp.models.methods import (
    attached_methods,
    disable_method,
    find_device,
    get_attachment,
    observe_selections,
    swap_methods,
    temporary_attributes,
)

log = logging.get_logger(__name__)

LENGTH = 12
PADDING = 3  # of the second sequence
STEPS = (LENGTH - 3, 2, 1)  # tokens per forward pass with a KV cache
# of logits, relative: rounding in half precision accumulates over layers, an unknown rule shows in every token
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE = 0.1
VERIFIED: set[tuple[Any, ...]] = set()  # what `describe_code` returns of models that were compared


def check_exact(model: PreTrainedModel) -> None:
    """Raise UserError unless layers that keep all pairs give the base's logits.

    Two short sequences, one padded on the left, go through the base and the attached model: with masks and through the
    KV cache, once for models that run the same code; then through the method itself, which every layer must call.
    Skipped where weights are missing (on the meta device) or sharded.
    """
    parameters, methods = list(model.parameters()), attached_methods(model)
    if any(isinstance(p, DTensor) for p in parameters):
        log.warning_once("attach: sharded parameters, so exactness is not checked; attach before fully_shard to check")
        return
    if not all(has_values(p) for p in parameters):
        return
    code, called = describe_code(model), set()
    with torch.no_grad(), temporary_attributes(model.modules(), training=False):
        if code is None or code not in VERIFIED:
            compare_with_base(model)
            VERIFIED.update([] if code is None else [code])
        tokens, mask = (x[:, : PADDING + 2] for x in make_inputs(model))
        failure = f"{type(model).__name__} cannot run this attention method"
        with observe_selections(model, lambda index, *_: called.add(index)):
            run(failure, partial(compute_logits, model, tokens, mask))
    check_called(failure, methods, called)
    for method in methods.values():
        method.path = None


def describe_code(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """Return what decides on the exactness of an attached model; None where an instance was changed.

    A `forward` of a module's own and hooks of others may do anything, and are not to be kept alive.
    """
    attached = {handle.id for handle in get_attachment(model).handles}
    code: list[Any] = []
    for module in model.modules():
        if "forward" in vars(module) or {*module._forward_hooks, *module._forward_pre_hooks} - attached:
            return None
        code += [type(module), type(module).forward]
    dtypes = {p.dtype for p in model.parameters()}
    return frozenset(attached_methods(model)), frozenset(dtypes), str(model.config), *code


def check_called(failure: str, layers: Iterable[int], called: Collection[int]) -> None:
    """Raise UserError for layers that did not call their attention method."""
    if skipped := [index for index in layers if index not in called]:
        raise UserError(f"{failure}: layers {skipped} do not call it. Leave them out with layers=[...].")


def compare_with_base(model: PreTrainedModel) -> None:
    """Compare the base's logits with windows longer than the input."""
    name, methods = type(model).__name__, attached_methods(model)
    tokens, padded = make_inputs(model)
    compute = partial(run, f"{name} itself fails on token ids")
    with disable_method(model):
        mask, expected = padded, compute(partial(compute_logits, model, tokens, padded))
        # some bases give NaN for a row of padding (eager in float64); the scale of dynamic int8 activations depends on
        # the tokens under the padding
        other = compute(partial(compute_logits, model, tokens.where(padded.bool(), tokens + 1), padded))
        limit = TOLERANCE.get(expected.dtype, COARSE)
        if not relative_error(other, expected, padded, limit) < limit:
            mask, limit = torch.ones_like(padded), COARSE
            expected = compute(partial(compute_logits, model, tokens, mask))
    if not expected[mask.bool()].isfinite().all():
        raise UserError(f"{name} itself gives NaN or infinity for token ids. Check its weights.")
    for path, steps in (("by masks", None), ("through the cache", STEPS)):
        failure = f"{name} cannot run an attached method {path}"
        windows: dict[int, AttentionMethod] = {
            index: WindowOnly.create(method.shape, window=LENGTH, sinks=0) for index, method in methods.items()
        }
        compute = partial(run, failure, partial(compute_logits, model, tokens, mask, steps))
        with swap_methods(model, windows):
            for method in windows.values():
                method.backend = "masked"
            logits = compute()
        error = relative_error(logits, expected, mask, limit)
        if error >= limit and steps:  # the KV caches of some bases are not exact themselves
            with disable_method(model):
                error = relative_error(logits, compute(), mask, limit)
        if error >= limit:
            raise UserError(
                f"{failure}: with nothing pruned its logits differ from the base's by {error:.1e} (relative), so its "
                "attention has a rule that is not supported"
            )
        check_called(failure, windows, [index for index, method in windows.items() if method.path])


def make_inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Make token ids and a padding mask, `[2, T]`."""
    size = model.config.get_text_config().vocab_size
    tokens = torch.randint(size // 4, size // 2, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :PADDING] = 0
    device = find_device(model)
    return tokens.to(device), mask.to(device)


def compute_logits(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, steps: tuple[int, ...] | None = None
) -> Tensor:
    """Compute logits `[2, T, V]`, in one pass, or in `steps` with a KV cache."""
    # the auxiliary loss of experts fails in some bases when there are cached tokens
    options = {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
    if steps is None:
        logits: Tensor = model(input_ids=tokens, attention_mask=mask, use_cache=False, **options).logits
        return logits
    cache, parts, end = None, [], 0
    for part in tokens.split(list(steps), 1):
        end += part.shape[1]
        out = model(input_ids=part, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True, **options)
        cache = out.get("past_key_values")
        if cache is None:
            raise UserError("it returns no KV cache")
        parts.append(out.logits)
    return torch.cat(parts, 1)


def run(failure: str, compute: Callable[[], Tensor]) -> Tensor:
    """Return `compute()`, or raise UserError with `failure` and the reason."""
    try:
        return compute()
    except Exception as error:  # of the model's own code
        reason = first_line(error) if str(error) else type(error).__name__
        raise UserError(f"{failure}: {reason}") from error


def relative_error(logits: Tensor, expected: Tensor, mask: Tensor, limit: float) -> float:
    """Return the largest difference of logits, relative to the largest logit.

    Under the coarse limit of the median token of a sequence: an expert chosen by rounding changes some tokens.
    """
    error = (logits - expected).abs().amax(-1).float() / expected[mask.bool()].abs().max().float()
    rows = [row[valid.bool()] for row, valid in zip(error, mask, strict=True)]
    worst = [row.median() if limit == COARSE else row.max() for row in rows]
    return float(torch.stack(worst).nan_to_num(float("inf")).max())
