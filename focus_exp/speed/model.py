"""The whole model with an attached method against the base: prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.kernels.cpu_sparse import FULL_FROM, unavailable_reason
from focus_exp.attention.selection import PairCounts, Selection, Sequence
from focus_exp.models.cache_size import count_keys_and_bytes
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

Context = Callable[[], AbstractContextManager[object]]


@torch.no_grad()
def prefill(call: Callable[..., Any], tokens: Tensor, precision: Precision) -> None:
    with precision.context():
        call(input_ids=tokens, use_cache=False, logits_to_keep=1)


def run_in(context: Context, work: Work) -> None:
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


def compiled_calls(model: PreTrainedModel, modes: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Return the model as called and, by a name, compiled in these modes of torch.compile; earlier graphs are freed."""
    torch.compiler.reset()  # a graph for each side, length and clock would reach the limit of recompilations
    calls: dict[str, Callable[..., Any]] = {"": model}
    for mode in modes:
        name = "compiled" if mode == "default" else f"compiled ({mode})"
        calls[name] = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    return calls


def compare_ways(
    variant: str,
    full: Mapping[str, Mapping[str, float | None]],
    ours: Mapping[str, Mapping[str, float | None]],
    settings: dict[str, Any],
    density: float,
) -> Iterator[Measurement]:
    """Yield the measurements of each way to run the variant, next to the fastest way to run full attention.

    full, ours: `seconds` and `peak_bytes` by the names of the ways.
    """
    fastest = min(full, key=lambda name: full[name]["seconds"] or 0.0)
    for path, way in ours.items():
        at = settings | {"full_kernel": fastest, "path": path}
        yield from compare_times(variant, full[fastest], way, at, density)


def time_prefill(
    model: PreTrainedModel,
    tokens: Tensor,
    precision: Precision,
    repeats: int,
    variant: str,
    modes: Iterable[str] = (),
    **settings: Any,
) -> Iterator[Measurement]:
    """Time the clock "prefill": logits of the token after `tokens` (1, T), in turn with full attention.

    modes: of torch.compile in which both are timed, too.
    """
    path, density = describe_pass(model, tokens, precision)
    full, ours = dict[str, Work](), dict[str, Work]()
    for name, call in compiled_calls(model, modes).items():
        run = partial(prefill, call, tokens, precision)
        ours[describe_way(path, name)] = run
        kernels = full_attention_works(model, run, tokens.shape[1])
        full |= {describe_way(kernel, name): work for kernel, work in kernels.items()}
    seconds = time_in_turns({**full, **{f"ours {name}": run for name, run in ours.items()}}, repeats, precision.device)

    def measure(name: str, work: Work) -> dict[str, float | None]:
        return {"seconds": seconds[name], "peak_bytes": measure_peak(lambda: work, precision.device)}

    settings |= describe_case("prefill", model, tokens, precision, repeats)
    sides = {name: measure(name, work) for name, work in full.items()}
    yield from compare_ways(
        variant, sides, {name: measure(f"ours {name}", run) for name, run in ours.items()}, settings, density
    )


def time_decode_model(
    model: PreTrainedModel,
    tokens: Tensor,
    precision: Precision,
    repeats: int,
    variant: str,
    modes: Iterable[str] = (),
    **settings: Any,
) -> Iterator[Measurement]:
    """Time the clock "decode model": the whole model for one token, up to as many as `tokens` (1, T).

    The prompt is shorter by the tokens that are decoded, so that none is beyond position T. Both sides have a dynamic
    and a static cache; compiled models have the latter.

    Raises:
        RuntimeError: T is too short for one prompt token.
    """
    calls = compiled_calls(model, modes)
    decoded = (repeats + 1) * DECODE_STEPS * len(calls)  # one round to warm up
    if tokens.shape[1] <= decoded:
        raise RuntimeError(f"bench.decode_lengths must be > {decoded}, the tokens that are decoded")
    prompt, works, decoders = tokens[:, :-decoded], dict[str, Work](), dict[str, Decoder]()
    contexts: dict[str, Context] = {"full": partial(disable_method, model), "ours": nullcontext}
    for (side, context), kind in product(contexts.items(), ("dynamic", "static")):
        with context():
            decoder = Decoder(model, prompt, precision, tokens.shape[1] if kind == "static" else None)
        for mode, call in calls.items():
            if kind == "static" or call is model:
                name = f"{side} {describe_way(kind, mode)}"
                works[name], decoders[name] = partial(run_in, context, partial(decoder.run, call)), decoder
    seconds = time_in_turns(works, repeats, precision.device)
    sides: dict[str, dict[str, dict[str, float | None]]] = {"full": {}, "ours": {}}
    keys: dict[str, int] = {}
    for name, decoder in decoders.items():
        side, _, way = name.partition(" ")
        keys[side], size = decoder.count_keys_and_bytes()
        sides[side][f"cached, {way}"] = {"seconds": seconds[name] / DECODE_STEPS, "peak_bytes": size}
    settings |= describe_case("decode model", model, tokens, precision, repeats)
    yield from compare_ways(variant, sides["full"], sides["ours"], settings, keys["ours"] / keys["full"])


def describe_way(*parts: str) -> str:
    return ", ".join(filter(None, parts))


class Decoder:
    """Greedy decoding after a prompt (1, T), DECODE_STEPS tokens at a time.

    room: tokens of a static cache; None for a dynamic one.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, precision: Precision, room: int | None = None) -> None:
        self.model, self.precision = model, precision
        self.cache: Cache = DynamicCache(config=model.config)
        if room is not None:
            self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.token = tokens
        self.step(model)

    @torch.no_grad()
    def step(self, call: Callable[..., Any]) -> None:
        with self.precision.context():
            out = call(input_ids=self.token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token = out.logits[:, -1:].argmax(-1)

    def run(self, call: Callable[..., Any]) -> None:
        for _ in range(DECODE_STEPS):
            self.step(call)

    def count_keys_and_bytes(self) -> tuple[int, int]:
        """Return keys that the last step read and bytes of the cache, over the attached layers."""
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


def describe_case(
    clock: str, model: PreTrainedModel, tokens: Tensor, precision: Precision, repeats: int
) -> dict[str, Any]:
    """Return the settings that both ways to time a whole model have."""
    dtype = "bf16-mixed" if precision.autocast else str(model.dtype).removeprefix("torch.")
    layer = str(model_shape(model))
    return {"clock": clock, "seq_len": tokens.shape[1], "repeats": repeats, "layer": layer, "dtype": dtype}


def attention_name(model: PreTrainedModel) -> str:
    """Return the base model's own attention implementation."""
    with disable_method(model):
        return str(model.config._attn_implementation)


def model_shape(model: PreTrainedModel) -> Shape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(config.hidden_size, heads, getattr(config, "num_key_value_heads", None) or heads, head_dim)
