"""The whole model with an attached method against the base: prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.kernels.cpu_sparse import FULL_FROM, unavailable_reason
from focus_exp.attention.selection import PairCounts, Selection, Sequence
from focus_exp.models.hf_cache import count_keys_and_bytes
from focus_exp.models.methods import (
    attached_methods,
    disable_method,
    observe_selections,
    swap_methods,
)
from focus_exp.results.measurement import Measurement
from focus_exp.speed.timing import Work, compare_times, measure_peak, time_in_turns
from focus_exp.speed.workload import Shape
from focus_exp.training.precision import Precision

DECODE_STEPS = 8  # tokens decoded one after the other in one measurement


@torch.no_grad()
def prefill(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> None:
    with precision.context():
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)


def run_in(context: Callable[[], AbstractContextManager[object]], work: Work) -> None:
    with context():
        work()


class FullAttention(AttentionMethod):
    """Keep all pairs: full attention by the fastest kernel of `focus_exp.attention`."""

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        return Selection(is_dense=True)

    def is_dense(self) -> bool:
        return True


def full_attention_works(model: PreTrainedModel, work: Work, length: int) -> dict[str, Work]:
    """Return `work` under full attention, by the kernels that may be the fastest for so many tokens."""
    works: dict[str, Work] = {attention_name(model): partial(run_in, partial(disable_method, model), work)}
    if model.device.type == "cpu" and length >= FULL_FROM and unavailable_reason() is None:
        full: dict[int, AttentionMethod] = {
            i: FullAttention.create(m.shape) for i, m in attached_methods(model).items()
        }
        works["cpu"] = partial(run_in, partial(swap_methods, model, full), work)
    return works


def time_prefill(
    model: PreTrainedModel, tokens: Tensor, precision: Precision, repeats: int, variant: str, **settings: Any
) -> list[Measurement]:
    """Time the clock "prefill": logits of the token after `tokens` (1, T), in turn with full attention."""
    run = partial(prefill, model, tokens, precision)
    full = full_attention_works(model, run, tokens.shape[1])
    seconds = time_in_turns({**full, "ours": run}, repeats, precision.device)
    kernel = min(full, key=lambda name: seconds[name])

    def measure(name: str, work: Work) -> dict[str, float | None]:
        return {"seconds": seconds[name], "peak_bytes": measure_peak(lambda: work, precision.device)}

    path, density = describe_pass(model, tokens, precision)
    settings = {
        "clock": "prefill", "seq_len": tokens.shape[1], "repeats": repeats, **settings,
        **describe_model(model, precision), "full_kernel": kernel, "path": path,
    }  # fmt: skip
    return compare_times(variant, measure(kernel, full[kernel]), measure("ours", run), settings, density)


def time_decode_model(
    model: PreTrainedModel, tokens: Tensor, precision: Precision, repeats: int, variant: str, **settings: Any
) -> list[Measurement]:
    """Time the clock "decode model": the whole model for one token, up to as many as `tokens` (1, T).

    The prompt is shorter by the tokens that are decoded, so that none is beyond position T.

    Raises:
        RuntimeError: T is too short for one prompt token.
    """
    decoded = (repeats + 1) * DECODE_STEPS  # one round to warm up
    if tokens.shape[1] <= decoded:
        raise RuntimeError(f"bench.decode_lengths must be > {decoded}, the tokens that are decoded")
    prompt = tokens[:, :-decoded]
    ours = Decoder(model, prompt, precision)
    with disable_method(model):
        full = Decoder(model, prompt, precision)
    works: dict[str, Work] = {"full": partial(run_in, partial(disable_method, model), full.run), "ours": ours.run}
    seconds = time_in_turns(works, repeats, precision.device)
    settings = {
        "clock": "decode model", "seq_len": tokens.shape[1], "repeats": repeats, **settings,
        **describe_model(model, precision), "full_kernel": f"DynamicCache, {attention_name(model)}", "path": "cached",
    }  # fmt: skip
    sides, keys = {}, {}
    for name, decoder in {"full": full, "ours": ours}.items():
        keys[name], size = decoder.count_keys_and_bytes()
        sides[name] = {"seconds": seconds[name] / DECODE_STEPS, "peak_bytes": size}
    return compare_times(variant, sides["full"], sides["ours"], settings, density=keys["ours"] / keys["full"])


class Decoder:
    """Greedy decoding after a prompt (1, T), DECODE_STEPS tokens at a time."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self.cache: Cache | None = None
        self.token = tokens
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        with self.precision.context():
            out = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def run(self) -> None:
        for _ in range(DECODE_STEPS):
            self.step()

    def count_keys_and_bytes(self) -> tuple[int, int]:
        """Return keys that the last step read and bytes of the cache, over the attached layers."""
        assert self.cache is not None
        attached = attached_methods(self.model)
        layers = [count_keys_and_bytes(layer) for index, layer in enumerate(self.cache.layers) if index in attached]
        return sum(keys for keys, _ in layers), sum(size for _, size in layers)


def describe_pass(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> tuple[str, float]:
    """Return the kernels of a pass over these tokens, and its density."""
    counts: list[PairCounts] = []

    def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        counts.append(method.count_pairs(selection, sequence))

    with observe_selections(model, observe):
        prefill(model, tokens, precision)
    path = ", ".join(sorted({m.path or "" for m in attached_methods(model).values()}))
    return path, mean(pairs.density for pairs in counts)


def describe_model(model: PreTrainedModel, precision: Precision) -> dict[str, Any]:
    """Return a model's shape and precision as settings."""
    dtype = "bf16-mixed" if precision.autocast else str(model.dtype).removeprefix("torch.")
    return {"layer": str(model_shape(model)), "dtype": dtype}


def attention_name(model: PreTrainedModel) -> str:
    """Return the base model's own attention implementation."""
    with disable_method(model):
        return str(model.config._attn_implementation)


def model_shape(model: PreTrainedModel) -> Shape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(config.hidden_size, heads, getattr(config, "num_key_value_heads", None) or heads, head_dim)
