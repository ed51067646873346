"""Check and time the kernels on a CUDA device, with torch and triton alone: python tests/gpu_clock.py [--out FOLDER].

Ends in runs/gpu/gpu.json and speed_gpu.md. --tiny runs everything at toy sizes, without a device under
TRITON_INTERPRET=1. --flash FA3 or FA4 has torch run that FlashAttention, whose package must be installed, in place of
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention as torch_attention
import triton
from gpu_checks import CASES, Case

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.baselines.key_gate import KeyGate
from focus_exp.attention.focus import Focus
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.kernels import KERNELS
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence
from focus_exp.results.environment import commit
from focus_exp.speed.timing import Work, device_name, synchronize, time_in_turns
from focus_exp.speed.workload import Shape, Tensors, full_attention, full_attention_kernels, run_full_step

KILO = 1024
WINDOW, SINKS = 128, 4
KEPT = 0.2  # of the distant pairs, by two encoders and by the key gate
CALIBRATION = 2048  # random tokens by which their thresholds are set
LAYERS = {
    "SmolLM2 135M": Shape(576, 9, 3, 64), "Qwen2.5 0.5B": Shape(896, 14, 2, 64), "Mistral 7B": Shape(4096, 32, 8, 128)
}  # fmt: skip
TINY_LAYER = {"tiny": Shape(32, 2, 1, 16)}
PUBLISHED, DUAL, GATE = "published form", "two encoders", "key gate"
Form = tuple[str, int, str]  # form, K, kernel
PAPER: list[Form] = [(PUBLISHED, groups, kernel) for kernel in ("flash", "triton") for groups in (4, 8)]  # table 6
FORMS: list[Form] = [*((DUAL, groups, "triton") for groups in (32, 16, 8)), (GATE, 1, "triton"), *PAPER]
LENGTHS = {length * KILO: FORMS for length in (1, 2, 4, 8, 16, 64, 256)} | {
    32 * KILO: PAPER, 1024 * KILO: [(DUAL, 8, "triton"), *PAPER]
}  # fmt: skip
SMALLEST_ALONE_FROM = 1024 * KILO  # tokens from which the first layer alone is timed
STEP_AT = 16 * KILO  # tokens
LAUNCHED_FROM = 16 * KILO  # tokens from which a launch is nothing to the time of full attention
SHOWN = (
    "layer", "tokens", "form", "K", "k", "kernel", "full kernel", "full [ms]", "full captured [ms]", "focus [ms]",
    "captured [ms]", "times faster", "as graphs", "bound by pairs", "commit",
)  # fmt: skip
TABLE_NOTES = """
One attention layer with a window of 128 and 4 sinks, bf16, one sequence, routing included, in turn with full attention
by the fastest of torch's kernels. Encoders, gates and hidden states are random; two encoders and the key gate keep a
fifth of the distant pairs, the published form 1/K. flash: by two of torch's FlashAttention calls. times faster: as
called from Python on an idle GPU; as graphs: both captured in a CUDA graph, or, where full attention was not captured,
from 16,384 tokens on against its time as called. step: forward and backward of attention. bound by pairs: all pairs
over kept pairs, which no kernel can exceed. Rows of commits 1afbcd6 and de03699 are of earlier kernels, with balanced
groups (torch-flash: groups by torch's FlashAttention 2, the window by a Triton kernel).
"""
REPEATS = 5
SECONDS = 540  # after which nothing more is begun


@dataclass(frozen=True)
class Contender:
    """A method with random weights and the tensors of one layer."""

    method: AttentionMethod
    tensors: Tensors
    k: int | None

    @staticmethod
    def build(form: str, groups: int, kernel: str, shape: Shape, tensors: Tensors) -> Contender:
        device = tensors.hidden.device
        layer = LayerShape(shape.width, shape.heads, shape.head_dim, 0, shape.kv_heads)
        method = make_method(form, groups, layer, device)
        method.backend, method.sparse_from = kernel, 0
        # on a CPU those of Triton refuse by their own rule, and the interpreter runs them all the same
        method.select_kernels = lambda *_: [KERNELS[kernel]]  # type: ignore[method-assign]
        return Contender(method, tensors, 1 if form == PUBLISHED else None)

    @property
    def args(self) -> AttentionArgs:
        return AttentionArgs(self.tensors.q.shape[-1] ** -0.5)

    def run(self) -> torch.Tensor:
        """Route and attend."""
        sequence, x = Sequence.plain(1, self.tensors.length, self.tensors.hidden.device), self.tensors
        return self.method.attend(x.q, x.k, x.v, self.method.route(x.hidden, sequence), sequence, self.args)

    def step(self, selection: Selection, sequence: Sequence) -> None:
        """Run forward and backward to q, k and v."""
        q, k, v = self.tensors.q, self.tensors.k, self.tensors.v
        out = self.method.attend(q, k, v, selection, sequence, self.args)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def make_method(form: str, groups: int, layer: LayerShape, device: torch.device) -> AttentionMethod:
    """Make a layer's method in eval mode; two encoders and the key gate keep KEPT of the distant pairs."""
    torch.manual_seed(groups)
    sample = torch.randn(1, CALIBRATION, layer.width, device=device)
    method: AttentionMethod
    if form == PUBLISHED:
        method = Focus.create(layer, groups=groups, top_k=1, window=WINDOW, sinks=SINKS).to(device).eval()
        method.hard = True
    elif form == GATE:
        method = KeyGate.create(layer, window=WINDOW, sinks=SINKS).to(device).eval()
        with torch.no_grad():
            method.threshold.fill_(float(torch.quantile(method.scores(sample).flatten(), 1 - KEPT)))
    else:
        method = FocusDual.create(
            layer, groups=groups, top_k=1, window=WINDOW, sinks=SINKS, counts="query"
        ).to(device).eval()  # fmt: skip
        method.worth.normal_(std=layer.width**-0.5)
        with torch.no_grad():
            scores = method.logits(sample, torch.arange(CALIBRATION, device=device)[None])[0]
            limits = torch.quantile(scores[0].flatten(1), 1 - KEPT, dim=1)
            method.thresholds.copy_(limits[:, None].expand_as(method.thresholds))
    return method


class Clock:
    """Check and time on one device, until the time is up."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16  # which the interpreter has
        self.until = time.monotonic() + SECONDS
        self.skipped: list[str] = []
        self.layers = TINY_LAYER if tiny else LAYERS
        tiny_forms: list[Form] = [(PUBLISHED, 2, "triton"), (DUAL, 4, "triton"), (GATE, 1, "triton")]
        self.lengths = {48: [*tiny_forms, (PUBLISHED, 2, "flash")]} if tiny else dict(sorted(LENGTHS.items()))

    def skip(self, reason: str) -> None:
        print(f"skipped: {reason}", flush=True)
        self.skipped.append(reason)

    def checks(self) -> dict[str, Any]:
        """Compare with the reference; meanwhile compile what is timed, which takes longest."""
        small = [Case(dtype=torch.float16, length=20, size=16, kernel=kernel) for kernel in ("triton", "flash")]
        cases = small if self.tiny else CASES
        forms = [] if self.tiny else [(name, *form) for name in LAYERS for form in FORMS if form[2] == "triton"]
        wrong: dict[str, Any] = {}
        pool: Executor = ThreadPoolExecutor(1) if self.tiny else ProcessPoolExecutor(15, get_context("spawn"))
        with pool:
            compiled = {form: pool.submit(compile_form, *form) for form in forms}
            errors = {case: pool.submit(case.errors, self.device.type) for case in cases}
            for case, future in errors.items():
                if error := future.exception() or future.result():
                    wrong[str(case)] = str(error)[-400:]
            for form, future in compiled.items():
                if error := future.exception():
                    self.skip(f"compiling {form}: {str(error)[-400:]}")
        right = len(cases) - len(wrong)
        print(f"checks: {right} right, {len(wrong)} wrong {json.dumps(wrong, indent=1) if wrong else ''}", flush=True)
        return {"right": right, "wrong": wrong}

    def rows(self) -> Iterator[dict[str, Any]]:
        for length, forms in self.lengths.items():
            for name, shape in list(self.layers.items())[: 1 if length >= SMALLEST_ALONE_FROM else None]:
                if time.monotonic() > self.until:
                    self.skip(f"{name} at {length:,} tokens")
                    continue
                try:
                    yield from self.measure(name, shape, length, forms)
                except RuntimeError as error:
                    self.skip(f"{name} at {length:,} tokens: {str(error).splitlines()[0]}")
                for form in forms if self.tiny or length == STEP_AT else []:
                    if form[:2] == forms[-1][:2]:
                        try:
                            yield self.measure_step(name, shape, length, *form)
                        except RuntimeError as error:
                            self.skip(f"step of {form}: {str(error).splitlines()[0]}")

    @torch.no_grad()
    def measure(self, name: str, shape: Shape, length: int, forms: list[Form]) -> Iterator[dict[str, Any]]:
        """Time full attention by each of its kernels and every form: as called, and captured in a graph."""
        tensors = Tensors.random(shape, length, self.dtype, self.device)
        every = full_attention_kernels(tensors)
        is_gpu, is_long = self.device.type == "cuda", length > 64 * KILO
        works: dict[str, Work] = {}
        for kernel in every:
            if kernel == "sdpa-efficient":
                continue
            with suppress(RuntimeError):  # it does not take these tensors
                every[kernel]()
                works[f"full {kernel}"] = every[kernel]
        contenders: dict[Form, Contender] = {}
        for form in forms:
            contender = Contender.build(*form, shape, tensors)
            try:
                contender.run()
            except RuntimeError as error:
                self.skip(f"{form} at {length:,} tokens: {str(error).splitlines()[0]}")
                continue
            contenders[form], works[str(form)] = contender, contender.run
        for label, work in list(works.items()) if is_gpu else []:
            if is_long and label.endswith("'flash')"):  # a graph keeps what its work allocates
                continue
            with suppress(RuntimeError):  # something in it waits for the device
                works[f"{label} captured"] = capture(work)
        repeats = 1 if length > 256 * KILO or self.tiny else 2 if is_long else REPEATS
        seconds = time_in_turns(works, repeats, self.device)
        full = {label: s for label, s in seconds.items() if label.startswith("full")}
        best = min((label for label in full if not label.endswith("captured")), key=lambda label: full[label])
        captured_full = min((s for label, s in full.items() if label.endswith("captured")), default=None)
        sequence = Sequence.plain(1, length, self.device)
        for (name_of_form, groups, kernel), contender in contenders.items():
            label = str((name_of_form, groups, kernel))
            counts = contender.method.count_pairs(contender.method.route(tensors.hidden, sequence), sequence)
            row = {
                "layer": name, "tokens": length, "form": name_of_form, "K": groups, "k": contender.k, "kernel": kernel,
                "full kernel": best.removeprefix("full "), "full [s]": seconds[best],
                "full captured [s]": captured_full, "full by kernel [s]": full, "focus [s]": seconds[label],
                "captured [s]": seconds.get(f"{label} captured"), "ratio": seconds[best] / seconds[label],
                "bound by pairs": 1 / counts.density,
            }  # fmt: skip
            if captured_full and row["captured [s]"]:
                row["captured ratio"] = captured_full / row["captured [s]"]
            print("measured:", json.dumps(row), flush=True)
            yield row

    def measure_step(self, name: str, shape: Shape, length: int, form: str, groups: int, kernel: str) -> dict[str, Any]:
        """Time forward and backward of attention."""
        tensors = Tensors.random(shape, length, self.dtype, self.device).with_grad()
        full_kernel, full = full_attention(tensors, self.device)
        sequence = Sequence.plain(1, length, self.device)
        contender = Contender.build(form, groups, kernel, shape, tensors)
        with torch.no_grad():
            selection = contender.method.route(tensors.hidden, sequence)
        works = {"full": partial(run_full_step, full, tensors), "focus": partial(contender.step, selection, sequence)}
        seconds = time_in_turns(works, 1 if self.tiny else REPEATS, self.device)
        row = {
            "layer": name, "tokens": length, "form": form, "K": groups, "k": contender.k, "kernel": f"{kernel}, step",
            "full kernel": full_kernel, "full [s]": seconds["full"], "focus [s]": seconds["focus"],
            "ratio": seconds["full"] / seconds["focus"],
        }  # fmt: skip
        print("measured:", json.dumps(row), flush=True)
        return row


@torch.no_grad()
def compile_form(layer: str, form: str, groups: int, kernel: str) -> None:
    """Compile what is timed into Triton's cache, in a process of its own."""
    tensors = Tensors.random(LAYERS[layer], CALIBRATION, torch.bfloat16, torch.device("cuda"))
    Contender.build(form, groups, kernel, LAYERS[layer], tensors).run()


def capture(work: Work) -> Work:
    """Return the replay of the work's CUDA graph; raises where something in it waits for the device."""
    for _ in range(2):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def table(records: list[dict[str, Any]]) -> str:
    """Format the rows of all records as Markdown."""
    lines, rows = ["# Speed on a GPU, measured", "", *TABLE_NOTES.strip().splitlines(), ""], []
    for record in records:
        made, checks = (record["commit"] or "unknown")[:7], record["checks"]
        lines.append(
            f"- {record['device']}, torch {record['torch']}, Triton {record['triton']}, commit {made}: "
            f"{checks['right']} of {checks['right'] + len(checks['wrong'])} cases of the kernels (outputs, gradients)"
            " are within the tolerance of the reference in float64"
        )
        rows += [{"form": PUBLISHED, **row, "commit": made} for row in record["rows"]]
    rows.sort(key=lambda row: (row["layer"], row["form"], row["K"], row["k"] or 0, row["tokens"], row["kernel"]))
    lines += ["", f"| {' | '.join(SHOWN)} |", "| --- " * len(SHOWN) + "|"]
    for row in rows:
        cells = ("-" if x is None else f"{x:.3g}" if isinstance(x, float) else f"{x}" for x in shown_cells(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown_cells(row: dict[str, Any]) -> list[Any]:
    """Return the cells of a row, times in milliseconds."""
    cells = {name.replace("[s]", "[ms]"): x * 1e3 if name.endswith("[s]") and isinstance(x, float) else x
             for name, x in row.items()}  # fmt: skip
    full = row.get("full captured [s]") or (row["full [s]"] if row["tokens"] >= LAUNCHED_FROM else None)
    graph = row.get("captured [s]")
    cells |= {"times faster": row["ratio"], "as graphs": full / graph if full and graph else None}
    return [cells.get(name) for name in SHOWN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--flash", choices=("FA3", "FA4"))
    parser.add_argument("--table", type=Path, help="only write speed_gpu.md of the records in this folder")
    options = parser.parse_args()
    if options.table:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.table.glob("*.json"))]
        (options.table / "speed_gpu.md").write_text(table(records), encoding="utf-8")
        return
    if options.flash:
        torch_attention.activate_flash_attention_impl(options.flash)
    clock = Clock(options.tiny)
    if clock.device.type == "cpu" and not options.tiny:
        sys.exit("torch sees no CUDA device; --tiny runs everything at toy sizes without one")
    folder = options.out or Path("runs", "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    record: dict[str, Any] = {
        "commit": os.environ.get("FOCUS_EXP_COMMIT") or commit(), "device": device_name(clock.device),
        "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
        "flash": options.flash or "FA2",
        "checks": clock.checks(), "rows": [],
    }  # fmt: skip
    for row in clock.rows():
        record["rows"].append(row)
        record |= {"skipped": clock.skipped, "seconds": time.monotonic() - began}
        (folder / "gpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    synchronize(clock.device)
    (folder / "speed_gpu.md").write_text(table([record]), encoding="utf-8")
    print(f"{folder / 'gpu.json'}: {record['seconds']:.0f} s")
    if record["checks"]["wrong"]:
        sys.exit("some checks were wrong")


if __name__ == "__main__":
    main()
