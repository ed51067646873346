"""Check and time the kernels on a CUDA device, with torch and triton alone: python tests/gpu_clock.py [--out FOLDER].

Takes what it finds, says what it skips, and ends in runs/gpu/gpu.json and speed_gpu.md. --tiny runs everything at toy
sizes, without a device under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_checks import CASES, Case

from focus_exp.attention.kernels import KERNELS, KernelRequirements, fused
from focus_exp.attention.kernels.layout import Plan
from focus_exp.attention.selection import Sequence
from focus_exp.results.environment import commit
from focus_exp.speed.layer import BenchmarkCase, Layer
from focus_exp.speed.timing import Work, device_name, synchronize, time_in_turns
from focus_exp.speed.workload import (
    FUSED,
    Shape,
    Tensors,
    balanced,
    density,
    full_attention,
    full_attention_kernels,
    make_layer,
    run_full_step,
)

KILO = 1024
WINDOW, SINKS = 128, 4
LAYERS = {"SmolLM2 135M": Shape(576, 9, 3, 64), "Mistral 7B": Shape(4096, 32, 8, 128)}
# tokens, then K and k; the shortest first, so that what the time does not suffice for is the longest
CLOCKS = [
    *((length * KILO, [(8, 1), (4, 1), (4, 2)]) for length in (1, 2, 4, 8, 16)),
    *((length * KILO, [(8, 1), (4, 1), (32, 1), (4, 2)]) for length in (32, 64, 256)),
    (1024 * KILO, [(8, 1), (4, 1), (32, 1)]),
]
TINY_LAYER, TINY_CLOCKS = {"tiny": Shape(32, 2, 1, 16)}, [(48, [(2, 1), (4, 2)])]
LAUNCHED_FROM = 16 * KILO  # tokens from which a launch is nothing to the time of full attention
SHOWN = (
    "layer", "tokens", "K", "k", "kernel", "full kernel", "full [ms]", "full captured [ms]", "focus [ms]",
    "kernels [ms]", "captured [ms]", "times faster", "as graphs", "bound by pairs", "bound by blocks", "commit",
)  # fmt: skip
TABLE_NOTES = """
One attention layer with balanced groups, a window of 128 and 4 sinks, bf16, one sequence, routing included, in turn
with full attention by the fastest of torch's kernels. times faster: as called from Python, where each of a layer's many
short calls costs more than the GPU takes for it; as graphs: both captured in a CUDA graph, or, where full attention was
not captured, from 16,384 tokens on against its time as called. kernels: without routing and lists. torch-flash: the
groups by torch's FlashAttention 2. step: forward and backward. The last two columns: what no such kernel can exceed.
"""
KERNEL_NAMES = ("triton", "flash-attn", "torch-flash", "torch-fa3", "torch-fa4")
STEP_AT = 16 * KILO  # tokens
REPEATS = 5


class Clock:
    """Everything that is found, on one device, until the time is up."""

    def __init__(self, seconds: float, tiny: bool, steps: bool) -> None:
        self.tiny, self.steps = tiny, steps
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16  # which the interpreter has
        self.until = time.monotonic() + seconds
        self.skipped: list[str] = []

    def skip(self, what: str) -> None:
        print(f"skipped: {what}", flush=True)
        self.skipped.append(what)

    def checks(self) -> dict[str, Any]:
        """Every case of the oracle; meanwhile what the clocks choose among is compiled, which takes longest."""
        cases = [Case("triton", dtype=torch.float16, length=20, size=16)] if self.tiny else CASES
        wrong: dict[str, dict[str, float] | str] = {}
        refused, passed = {}, 0
        workers = ThreadPoolExecutor(1) if self.tiny else processes()
        with workers as pool:
            what_to_compile = [] if self.tiny else compilations(self.steps)
            compiled = {what: pool.submit(compile_all, *what, self.dtype) for what in what_to_compile}
            served: dict[Case, Future[dict[str, float]]] = {}
            for case in cases:
                if self.device.type == "cuda" and (reason := case.refused()):
                    refused[case.kernel] = reason
                else:
                    served[case] = pool.submit(errors_of, case, self.device.type)
            for case, future in served.items():
                if (error := future.exception()) or future.result():
                    wrong[str(case)] = future.result() if error is None else str(error).strip()[-400:]
                else:
                    passed += 1
            for what, future in compiled.items():
                if error := future.exception():
                    self.skip(f"compiling {what}: {str(error).strip()[-400:]}")
        for name, reason in refused.items():
            self.skip(f"{name}: {reason}")
        print(f"checks: {passed} right, {len(wrong)} wrong {json.dumps(wrong, indent=1) if wrong else ''}", flush=True)
        return {"right": passed, "wrong": wrong}

    def rows(self) -> Iterator[dict[str, Any]]:
        for length, groupings in TINY_CLOCKS if self.tiny else CLOCKS:
            for name, shape in (TINY_LAYER if self.tiny else LAYERS).items():
                if time.monotonic() > self.until or (name == "Mistral 7B" and length > 256 * KILO):
                    self.skip(f"{name} at {length:,} tokens")
                    continue
                try:
                    yield from self.measured(name, shape, length, groupings)
                    if self.steps and (self.tiny or length == STEP_AT):
                        yield self.step(name, shape, length, *groupings[0])
                except RuntimeError as error:
                    self.skip(f"{name} at {length:,} tokens: {str(error).splitlines()[0]}")

    @torch.no_grad()
    def measured(
        self, name: str, shape: Shape, length: int, groupings: list[tuple[int, int]]
    ) -> Iterator[dict[str, Any]]:
        """Full attention by each of its kernels, and every kernel of Focus: as called, and captured in a graph."""
        tensors = Tensors.random(shape, length, self.dtype, self.device)
        on_gpu, every = self.device.type == "cuda", full_attention_kernels(tensors)
        full = {f"full {kernel}": every[kernel] for kernel in (FUSED if on_gpu else every)}
        works: dict[str, Work] = full | {f"{label} captured": captured(full[label]) for label in full if on_gpu}
        found: dict[str, tuple[str, BenchmarkCase]] = {}
        for groups, top_k in groupings:
            for kernel in KERNEL_NAMES:
                demand = KernelRequirements("cuda", self.dtype, shape.head_dim, one_group=top_k == 1)
                if (not on_gpu and kernel != "triton") or KERNELS[kernel].unsupported_reason(demand):
                    continue
                layer = Layer(shape, WINDOW, SINKS, self.dtype, self.device, kernel)
                contender = contender_of(layer, balanced(groups, length, top_k), tensors, kernel)
                label = f"{kernel} K={groups} k={top_k}"
                works[label], found[label] = partial(contender.run, tensors), (kernel, contender)
                works[f"{label} kernels"] = contender.prepare_kernels(tensors)
                if kernel == "triton" and on_gpu:
                    works[f"{label} captured"] = captured(works[label])
        seconds = time_in_turns(works, 1 if length > 64 * KILO or self.tiny else REPEATS, self.device)
        best = min(full, key=lambda label: seconds[label])
        best_captured = min((seconds[f"{label} captured"] for label in full if on_gpu), default=None)
        for label, (kernel, contender) in found.items():
            kept = density(contender.selection, length, WINDOW, SINKS)
            plan = Plan.of(contender.selection, contender.sequence, WINDOW, SINKS)
            row = {
                "layer": name, "tokens": length, "K": contender.groups.count, "k": contender.groups.top_k,
                "kernel": kernel, "full kernel": best.removeprefix("full "),
                "full [s]": seconds[best], "full captured [s]": best_captured,
                "full by kernel [s]": {label.removeprefix("full "): seconds[label] for label in full},
                "focus [s]": seconds[label], "kernels [s]": seconds[f"{label} kernels"],
                "captured [s]": seconds.get(f"{label} captured"), "ratio": seconds[best] / seconds[label],
                "bound by pairs": 1 / kept, "bound by blocks": length * (length + 1) / 2 / plan.pairs_in_tiles(),
            }  # fmt: skip
            if best_captured and row["captured [s]"]:
                row["captured ratio"] = best_captured / row["captured [s]"]
            print("measured:", json.dumps(row), flush=True)
            yield row

    def step(self, name: str, shape: Shape, length: int, groups: int, top_k: int) -> dict[str, Any]:
        """Forward and backward, the router's gradient included."""
        tensors = Tensors.random(shape, length, self.dtype, self.device).with_grad()
        full_kernel, full = full_attention(tensors, self.device)
        layer = Layer(shape, WINDOW, SINKS, self.dtype, self.device, "triton")
        contender = contender_of(layer, balanced(groups, length, top_k), tensors, "triton")
        works = {"full": partial(run_full_step, full, tensors), "focus": partial(contender.run_step, tensors)}
        seconds = time_in_turns(works, 1 if self.tiny else REPEATS, self.device)
        row = {
            "layer": name, "tokens": length, "K": groups, "k": top_k, "kernel": "triton, step",
            "full kernel": full_kernel, "full [s]": seconds["full"], "focus [s]": seconds["focus"],
            "ratio": seconds["full"] / seconds["focus"],
        }  # fmt: skip
        print("measured:", json.dumps(row), flush=True)
        return row


def processes() -> ProcessPoolExecutor:
    """No more of them than fit on one GPU, each with a context of its own."""
    return ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn"))


def errors_of(case: Case, device: str) -> dict[str, float]:
    """In a process of its own, with the kernels' least blocks, so that none has to be tuned."""
    for kernel in vars(fused.kernels()).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[-1:]
    return case.errors(device)


def compilations(steps: bool) -> Iterator[tuple[str, int, int, int, bool]]:
    """Layer, tokens, K, k and whether with a backward: below and above the length from which blocks are chosen anew."""
    for name in LAYERS:
        if steps:
            yield name, STEP_AT, 8, 1, True
        for length in (fused.LONG_FROM // 2, STEP_AT):
            yield from ((name, length, *grouping, False) for grouping in ((8, 1), (4, 2)))


def compile_all(name: str, length: int, groups: int, top_k: int, backward: bool, dtype: torch.dtype) -> None:
    """Every block of what a clock runs into Triton's cache, in a process of its own; its timings are not kept."""
    device, shape = torch.device("cuda"), LAYERS[name]
    tensors = Tensors.random(shape, length, dtype, device)
    layer = Layer(shape, WINDOW, SINKS, dtype, device, "triton")
    contender = BenchmarkCase.build(layer, balanced(groups, length, top_k), tensors)
    if backward:
        contender.run_step(tensors.with_grad())
    else:
        with torch.no_grad():
            contender.run(tensors)
    synchronize(device)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: what all of them measured."""
    said, rows = ["# Speed on a GPU, measured", "", *TABLE_NOTES.strip().splitlines(), ""], []
    for record in records:
        made, checks = (record["commit"] or "unknown")[:7], record["checks"]
        said.append(
            f"- {record['device']}, torch {record['torch']}, Triton {record['triton']}, commit {made}: "
            f"{checks['right']} of {checks['right'] + len(checks['wrong'])} cases of the kernels (outputs, gradients)"
            " are within the tolerance of the slow twin in float64"
        )
        rows += [row | {"commit": made} for row in record["rows"]]
    rows.sort(key=lambda row: (row["layer"], row["K"], row["k"], row["tokens"], row["kernel"]))
    return "\n".join([*said, "", *markdown_lines([shown(row) for row in rows])]) + "\n"


def markdown_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Format `rows` as a Markdown table whose columns are the keys of the first row."""
    lines = [f"| {' | '.join(rows[0])} |", "| --- " * len(rows[0]) + "|"]
    for row in rows:
        cells = ("-" if x is None else f"{x:.3g}" if isinstance(x, float) else f"{x}" for x in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Its columns in the table, in milliseconds."""
    full = row.get("full captured [s]") or (row["full [s]"] if row["tokens"] >= LAUNCHED_FROM else None)
    graph = row.get("captured [s]")
    known = {name.replace("[s]", "[ms]"): x * 1e3 if name.endswith("[s]") and x is not None else x
             for name, x in row.items() if name != "full by kernel [s]"}  # fmt: skip
    known |= {"times faster": row["ratio"], "as graphs": full / graph if full and graph else None}
    return {name: known.get(name) for name in SHOWN}


def triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def contender_of(layer: Layer, groups: Any, tensors: Tensors, kernel: str) -> BenchmarkCase:
    """Also where the interpreter runs a kernel that is for CUDA."""
    if layer.device.type == "cuda":
        return BenchmarkCase.build(layer, groups, tensors)
    method = make_layer(layer.shape, groups, layer.window, layer.sinks, "masked", layer.device)
    selection, sequence = groups.select(tensors.length, layer.device), Sequence.plain(1, tensors.length)
    # on a CPU the kernels refuse by their own rule, and the interpreter runs them all the same
    method.select_kernels = lambda *_: [KERNELS[kernel]]  # type: ignore[method-assign]
    return BenchmarkCase(layer, groups, method, selection, sequence, KERNELS[kernel])


def captured(work: Work) -> Work:
    """The work as one CUDA graph, tuned and compiled before; raises where something in it waits for the device."""
    for _ in range(2):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def break_even(rows: list[dict[str, Any]], ratio: str) -> dict[str, int | None]:
    """The least measured length from which on a setting is faster at all of them."""
    won: dict[str, int | None] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        setting = f"{row['layer']} {row['kernel']} K={row['K']} k={row['k']}"
        if ratio in row:
            won[setting] = (won.get(setting) or row["tokens"]) if row[ratio] > 1 else None
    return won


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", type=Path, help="only write speed_gpu.md of the records in this folder")
    parser.add_argument("--no-steps", action="store_true", help="no clocks of a training step, whose blocks take long")
    options = parser.parse_args()
    if options.table:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.table.glob("*.json"))]
        (options.table / "speed_gpu.md").write_text(table(records), encoding="utf-8")
        return
    clock = Clock(options.minutes * 60, options.tiny, not options.no_steps)
    if clock.device.type == "cpu" and not options.tiny:
        sys.exit("torch sees no CUDA device; --tiny runs everything at toy sizes without one")
    folder = options.out or Path("runs", "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    record: dict[str, Any] = {
        "commit": commit(), "device": device_name(clock.device), "torch": torch.__version__, "triton": triton_version(),
        "python": platform.python_version(), "checks": clock.checks(),
    }  # fmt: skip
    record["rows"] = list(clock.rows())
    record |= {
        "break_even": break_even(record["rows"], "ratio"),
        "break_even_captured": break_even(record["rows"], "captured ratio"),
        "skipped": clock.skipped,
    }
    synchronize(clock.device)
    record["seconds"] = time.monotonic() - began
    (folder / "gpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "speed_gpu.md").write_text(table([record]), encoding="utf-8")
    print(f"break-even: {record['break_even']}")
    print(f"break-even, captured: {record['break_even_captured']}")
    print(f"{folder / 'gpu.json'}: {record['seconds']:.0f} s")
    if record["checks"]["wrong"]:
        sys.exit("some checks were wrong")


if __name__ == "__main__":
    main()
