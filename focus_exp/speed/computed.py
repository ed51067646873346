"""What the two Triton kernels should cost on an H100, computed and not measured; only launches and waits are counted.

Assumed: an H100 SXM; bf16; one sequence, balanced groups; memory at 2.8 TB/s; 5 us for each launch, 2 us in a captured
graph; full attention by the fastest kernel (cuDNN, FlashAttention 3) at 430 TFLOP/s for heads of 64 and 600 for heads
of 128, less where sequences are short; Triton at 75 % of that rate, or at 60 %; the window at half of it; for groups by
FlashAttention 3 (FA3) tokens are gathered. The last row of a setting is the least length at which it is faster.
Measured since, on an H200 (gpu/speed_gpu.md): a launch from Python costs several times what is assumed here.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from focus_exp.attention.kernels.layout import Plan
from focus_exp.attention.selection import Sequence
from focus_exp.speed.workload import Shape, balanced, layer_method

BANDWIDTH, LAUNCH, NODE = 2.8e12, 5e-6, 2e-6  # bytes a second, seconds
TRITON, SLOWER = 0.75, 0.6  # of the fastest kernel's rate
WINDOW, SINKS, TILE = 128, 4, 128
LENGTHS = tuple(4096 * 4**n for n in range(5))
LAYERS = {"SmolLM2 135M": Shape(576, 9, 3, 64), "Mistral 7B": Shape(4096, 32, 8, 128)}
GROUPINGS = ((8, 1, False), (32, 1, False), (4, 2, False), (32, 4, True))  # K, k, groups per key/value head
SORT_LAUNCHES = 6  # of one stable radix sort of 16-bit keys
CALLED = ("aten::sort", "aten::searchsorted", "aten::topk")  # which torch.compile leaves as they are
GENERATED = (5, 11)  # kernels that it makes of the rest of the layout, for k = 1 and above: torch._inductor.metrics
WAITS = ("_local_scalar_dense", "nonzero", "unique", "bincount")


class Counts(TorchDispatchMode):
    """Operations that would launch something on a GPU, and those that would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = operation._schema.name
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in operation._schema.returns)
        self.of["waits"] += any(wait in name for wait in WAITS)
        launches = 0 if view or "empty" in name else SORT_LAUNCHES if name == "aten::sort" else 1
        self.of["launches"] += launches
        self.of["fused"] += launches if name not in CALLED else 0
        return operation(*arguments, **(options or {}))


@cache
def counted(groups: int, top_k: int) -> tuple[int, int]:
    """Launches and waits of a layer's attention: of routing, the layout as it is compiled, and the kernels."""
    shape, device = Shape(64, 2, 1, 16), torch.device("cpu")
    grouping = balanced(groups, 256, top_k)
    method, sequence = layer_method(shape, grouping, WINDOW, SINKS, "auto", device), Sequence.plain(1, 256)
    with torch.no_grad(), Counts() as routing:
        selection = method.route(torch.zeros(1, 256, shape.width), sequence)
    with Counts() as layout:
        Plan.of(selection, sequence, WINDOW, SINKS)
    calls = layout.of["launches"] - layout.of["fused"] + GENERATED[top_k > 1]
    return routing.of["launches"] + calls + 1 + top_k, routing.of["waits"] + layout.of["waits"]


def rate(head_dim: int, length: float) -> float:
    """FLOP/s of the fastest causal kernel."""
    return (430e12 if head_dim <= 64 else 600e12) * min(1.0, 0.55 + 0.45 * min(1.0, (length / 16384) ** 0.5))


def row(name: str, length: int, groups: int, top_k: int, per_head: bool) -> dict[str, Any]:
    """Milliseconds of one layer's parts, and how much faster it is than full attention."""
    shape, own = LAYERS[name], LAYERS[name].kv_heads if per_head else 1
    flops, share, pairs = 4 * shape.head_dim * shape.heads, length / groups, length * (length + 1) / 2
    near, distant = length * (WINDOW + SINKS), top_k / groups * pairs  # of balanced groups, those in the window too
    near_in_tiles = length * (WINDOW + TILE + 16)
    in_tiles = distant * (1 + 2 * TILE / share)  # tiles of the diagonal and of two groups are computed whole
    full = flops * pairs / rate(shape.head_dim, length) + 3 * LAUNCH
    q, kv = 2 * length * shape.heads * shape.head_dim, 2 * length * shape.kv_heads * shape.head_dim  # bytes
    lists = own * length * (groups * 4 * 3 + top_k * 60)
    inside = flops * in_tiles / rate(shape.head_dim, 2 * share)
    parts = {
        "window": flops * near_in_tiles / (0.5 * rate(shape.head_dim, length)),
        "groups": inside / TRITON,
        "reads and writes": ((3 + 4 * (top_k - 1)) * q + 2 * kv) / BANDWIDTH,
        "routing and lists": (2.4 * length * shape.width + lists) / BANDWIDTH,
    }
    launches, waits = counted(groups, top_k)
    nodes, busy = launches * NODE, sum(parts.values())
    by_flash = busy + inside * (1 - 1 / TRITON) + (2 * q + 4 * kv) / BANDWIDTH + 3 * NODE
    return {
        "layer": name, "tokens": length, "K": groups, "k": top_k, "groups of": "kv heads" if per_head else "the layer",
        "full [ms]": full * 1e3, **{f"{part} [ms]": seconds * 1e3 for part, seconds in parts.items()},
        "launches": launches, "waits": waits,
        "times faster": full / (busy + nodes), "not captured": full / max(busy + nodes, launches * LAUNCH),
        "Triton at 60 %": full / (busy + nodes + inside * (1 / SLOWER - 1 / TRITON)),
        "groups by FA3": full / (by_flash + nodes) if top_k == 1 else None,
        "bound by pairs": pairs / (distant + near), "bound by blocks": pairs / (in_tiles + near_in_tiles),
    }  # fmt: skip


def computed_speed() -> list[dict[str, Any]]:
    """A row for each layer, grouping and length, then one with the least length that is faster."""
    rows = []
    for name in LAYERS:
        for grouping in GROUPINGS:
            rows += [row(name, length, *grouping) for length in LENGTHS]
            crossing = (row(name, length, *grouping) for length in range(512, 1 << 18, 512))
            rows.append(next(each for each in crossing if each["times faster"] > 1))
    return rows


def table() -> str:
    """Markdown."""
    said = ["# Speed on a GPU: computed, not measured", "", (__doc__ or "").strip(), ""]
    return "\n".join([*said, *lines_of(computed_speed())]) + "\n"


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table whose columns are the keys of the first row."""
    lines = [f"| {' | '.join(rows[0])} |", "| --- " * len(rows[0]) + "|"]
    for each in rows:
        cells = ("-" if x is None else f"{x:.3g}" if isinstance(x, float) else f"{x}" for x in each.values())
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print(table(), end="")
