"""Time callables in turn in one process, and measure the peak memory of each on CUDA."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from focus_exp.results.measurement import Measurement

Work = Callable[[], object]


def time_in_turns(works: Mapping[str, Work], repeats: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each work over `repeats` rounds in which they alternate, after one to warm up.

    Neither `torch.utils.benchmark.Timer` nor `triton.testing.do_bench` alternates, so that a change of the clock rate
    would fall on one side of a ratio; the former adds two calls to each sample, the latter needs a GPU.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            elapsed = time_once(work, device)
            if turn:
                seconds[name].append(elapsed)
    return {name: median(values) for name, values in seconds.items()}


def time_once(work: Work, device: torch.device) -> float:
    """Return the seconds of one call; on CUDA by its events, which leave out the wait for the host."""
    synchronize(device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        synchronize(device)
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare_times(
    variant: str,
    full: Mapping[str, float | None],
    ours: Mapping[str, float | None],
    settings: dict[str, Any],
    density: float | None = None,
) -> list[Measurement]:
    """Return the measurements of a variant that was timed in turn with full attention.

    Args:
        full, ours: `seconds` (median) and, where known, `peak_bytes`. Empty where the clock failed.
        settings: clock, seq_len, repeats, what tells the case apart, and error.
        density: of the causal QK pairs.
    """
    time, full_time = ours.get("seconds"), full.get("seconds")
    value = full_time / time if time and full_time else None
    common: dict[str, Any] = {"settings": settings}
    case: dict[str, Any] = {"variant": variant, "reference": "full", "density": density, "n": settings.get("repeats")}
    measured = [Measurement(metric="speedup", value=value, unit="x", **case, **common)]
    for name, side, reference, kept in (("full", full, variant, 1.0), (variant, ours, "full", density)):
        common |= {"variant": name, "reference": reference, "density": kept}
        for metric, key, factor, unit in (
            ("latency_ms", "seconds", 1e3, "ms"),
            ("peak_memory_bytes", "peak_bytes", 1, "bytes"),
        ):
            if (number := side.get(key)) is not None:
                measured.append(Measurement(metric=metric, value=factor * number, unit=unit, **common))
    return measured


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_peak(prepare: Callable[[], Work], device: torch.device) -> int | None:
    """Return the peak CUDA bytes of the work that `prepare` makes, its inputs included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    work = prepare()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def begin_peak_memory() -> None:
    """Start a new run for `peak_memory`: the process may have had others before."""
    gc.collect()
    with suppress(OSError):  # Linux resets the high-water mark of the resident set by this
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Return the peak bytes of this process since `begin_peak_memory` or `measure_peak`, on the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
