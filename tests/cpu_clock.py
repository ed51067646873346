"""Focus on this CPU against torch's own attention, in one run: what the sparse path and the cache are held to.

    python tests/cpu_clock.py [--threads 2] [--repeats 5] [--lengths 8192 32768] [--dtypes float32 bfloat16] [--model]

The layer is SmolLM2-135M's: 9 query heads, 3 key/value heads of 64. Routing is timed with it. Ratios are medians over
rounds in which all contenders take turns. "of bound" is the ratio over the ratio that the pairs kept allow, "of its
own bound" over what the kernel's blocks allow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.method import AttentionMethod
from focus_exp.attention.parts import pairs_computed
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, count_pairs, select
from focus_exp.speed.decode import STEPS, Decoding, dynamic_steps, static_steps
from focus_exp.speed.layer import Layer
from focus_exp.speed.workload import Shape, Tensors, balanced, layer_method

SHAPE, WINDOW, SINKS = Shape(576, 9, 3, 64), 128, 4
DEVICE = torch.device("cpu")
Works = dict[str, Callable[[], object]]


def alternated(works: Works, repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each work in every round, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + repeats):
        for name, work in works.items():
            begin = clock()
            work()
            seconds[name].append(clock() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def ratio(full: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(full, ours, strict=True))


def own_groups(length: int, groups: int, top_k: int) -> Selection:
    """Balanced groups of each key/value head, other ones for queries than for keys."""
    asks, answers = (
        torch.cat([balanced(groups, length, k, seed=seed + head).scores for head in range(SHAPE.kv_heads)])[None]
        for seed, k in ((0, top_k), (100, 1))
    )
    queries, keys = select(asks, top_k, "query_topk"), select(answers, 1, "query_topk")
    return Selection(asks, queries.query_groups, keys.key_groups, key_assignment=answers)


def prefill(length: int, dtype: torch.dtype, repeats: int, clock: Callable[[], float]) -> Iterator[str]:
    tensors, sequence = Tensors.random(SHAPE, length, dtype, DEVICE), Sequence.plain(1, length)
    cases = {
        "K=8, k=1": (balanced(8, length), None, "60 % of bound at 8K, 85 % at 32K"),
        "K=4, k=2": (balanced(4, length, 2), None, "1.35x at 8K, 75 % of bound at 32K"),
        "K=32, k=4 per kv head": (balanced(32, length, 4), own_groups(length, 32, 4), "2x at 8K, 60 % at 32K"),
        "K=4, k=4": (balanced(4, length, 4), None, "0.97x"),
    }
    q, k, v = tensors.q, tensors.k, tensors.v
    works: Works = {"full": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)}
    layouts = {}
    for name, (groups, own, _) in cases.items():
        method = layer_method(SHAPE, groups, WINDOW, SINKS, "auto", DEVICE)
        layouts[name] = own or groups.selection(length, DEVICE)
        works[name] = layer_work(method, tensors, layouts[name], sequence, 1 if own is None else SHAPE.kv_heads)
    seconds = alternated(works, repeats, clock)
    for name, (_, _, wanted) in cases.items():
        times = ratio(seconds["full"], seconds[name])
        text = f"prefill {length} {dtype} {name}: {times:.2f}x"
        if not layouts[name].keeps_all:
            kept = count_pairs(layouts[name], sequence, WINDOW, SINKS).share_kept
            computed = pairs_computed(layouts[name], sequence, WINDOW, SINKS)
            text += (
                f", {times * kept:.0%} of bound {1 / kept:.2f}, {times * computed:.0%} of its own {1 / computed:.2f}"
            )
        yield f"{text} (wanted {wanted})"


def layer_work(
    method: AttentionMethod, tensors: Tensors, selection: Selection, sequence: Sequence, routings: int
) -> Callable[[], Tensor]:
    def work() -> Tensor:
        for _ in range(routings):
            method.route(tensors.hidden, sequence)
        return method.attend(tensors.q, tensors.k, tensors.v, selection, sequence, AttentionArgs(SHAPE.head_dim**-0.5))

    return work


def decoding(length: int, dtype: torch.dtype, repeats: int, clock: Callable[[], float]) -> Iterator[str]:
    layer = Layer(SHAPE, WINDOW, SINKS, dtype, DEVICE)
    tensors = Tensors.random(SHAPE, length, dtype, DEVICE)
    new = Tensors.random(SHAPE, STEPS, dtype, DEVICE, seed=1)
    works: Works = {"static": static_steps(tensors, new), "dynamic": dynamic_steps(tensors, new)}
    cases = {
        "K=8, k=1": (balanced(8, length), None),
        "K=4, k=2": (balanced(4, length, 2), None),
        "K=32, k=4 per kv head": (balanced(32, length, 4), own_groups(length + STEPS, 32, 4)),
    }
    works |= {name: Decoding(layer, groups, tensors, new, own).steps for name, (groups, own) in cases.items()}
    seconds = alternated(works, 3 * repeats, clock)
    best = min(("static", "dynamic"), key=lambda name: statistics.median(seconds[name]))
    for name in cases:
        step = statistics.median(seconds[name]) / STEPS
        yield (
            f"decode after {length} {dtype} {name}: {ratio(seconds[best], seconds[name]):.2f}x of a {best} cache, "
            f"{step * 1e6:.0f} us a step (wanted 0.6x after 2K, 2x after 8K)"
        )


def decoding_model(length: int, repeats: int, clock: Callable[[], float]) -> str:
    """SmolLM2-135M's architecture with random weights and routers, in float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from focus_exp import attach, disable_method, set_routing
    from focus_exp.speed.decode import MODEL_STEPS, Continuation
    from focus_exp.training.precision import Precision

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=16384, tie_word_embeddings=True,
    )  # fmt: skip
    model = set_routing(attach(AutoModelForCausalLM.from_config(config).eval(), "focus", groups=8), hard=True)
    tokens = torch.randint(49152, (1, length))
    precision = Precision(DEVICE, torch.float32, autocast=False, reason="")
    focus = Continuation(model, tokens, precision)
    with disable_method(model):
        full = Continuation(model, tokens, precision)

    def full_steps() -> None:
        with disable_method(model):
            full.steps()

    seconds = alternated({"full": full_steps, "focus": focus.steps}, repeats, clock)
    step = statistics.median(seconds["focus"]) / MODEL_STEPS
    times = ratio(seconds["full"], seconds["focus"])
    return f"decode model after {length}: {times:.2f}x, {step * 1e3:.1f} ms a step (wanted 1.0x after 2K)"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="with 1, this thread's time is taken, not the clock's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--past", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--model", action="store_true", help="decode steps of a whole model too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for length in options.lengths:
            for line in prefill(length, dtype, options.repeats, clock):
                print(line, flush=True)
        for past in options.past:
            for line in decoding(past, dtype, options.repeats, clock):
                print(line, flush=True)
    if options.model:
        print(decoding_model(2048, options.repeats, clock), flush=True)


if __name__ == "__main__":
    main()
