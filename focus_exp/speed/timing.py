"""Time callables in turn in one process, and measure the memory that each needs at most."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from focus_exp.results.measurement import Measurement

Work = Callable[[], object]
Result = TypeVar("Result")

_earlier_peak = 0  # bytes: peak of the run before a measurement reset the high-water mark


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
    **fractions: float | None,
) -> list[Measurement]:
    """Return the measurements of a variant that was timed in turn with full attention.

    Args:
        full, ours: `seconds` (median), and where known `attention_seconds` (the part spent in routing and attention),
            `peak_bytes`, `bytes_read` (keys and values that a decoding step reads). Empty where the clock failed.
        settings: clock, seq_len, repeats, what tells the case apart, and error.
        density: of the causal QK pairs.
        fractions: further fractions (0..1), such as `computed_density`, that of the kernel's blocks.
    """
    common: dict[str, Any] = {"variant": variant, "density": density, "settings": settings}
    measured = []
    for metric, key in (("speedup", "seconds"), ("attention_speedup", "attention_seconds")):
        time, full_time = ours.get(key), full.get(key)
        value = full_time / time if time and full_time else None
        if value is not None or metric == "speedup":
            n = settings.get("repeats") if metric == "speedup" else None
            measured.append(Measurement(metric=metric, value=value, unit="x", reference="full", n=n, **common))
    for name, side, reference in (("full", full, variant), (variant, ours, "full")):
        kept = common | {"variant": name, "density": 1.0 if name == "full" else density}
        for metric, key, factor, unit in (
            ("latency_ms", "seconds", 1e3, "ms"),
            ("attention_latency_ms", "attention_seconds", 1e3, "ms"),
            ("peak_memory_bytes", "peak_bytes", 1, "bytes"),
            ("bytes_read", "bytes_read", 1, "bytes"),
        ):
            if (number := side.get(key)) is not None:
                measured.append(
                    Measurement(metric=metric, value=factor * number, unit=unit, reference=reference, **kept)
                )
    measured += [
        Measurement(metric=metric, value=value, unit="fraction", **common)
        for metric, value in fractions.items()
        if value is not None
    ]
    return measured


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_in_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a module-level function returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class PeakMemory:
    """Peak bytes beyond those allocated when this object is made, so make it before the inputs.

    CUDA: torch's allocator. Linux: the resident set, whose high-water mark can be reset. Elsewhere it is unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        release_memory()
        is_cuda = device.type == "cuda"
        self.before = torch.cuda.memory_allocated(device) if is_cuda else read_proc_status("VmRSS")

    def measure(self, work: Work) -> int | None:
        """Return the peak while `work` runs, including what exists already."""
        global _earlier_peak
        release_memory()
        _earlier_peak = peak_memory()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            work()
            synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - (self.before or 0)
        with return_large_blocks():
            if self.before is None or not reset_high_water_mark():
                return None
            work()
            peak = read_proc_status("VmHWM")
        return None if peak is None else peak - self.before


def begin_peak_memory() -> None:
    """Start a new run for `peak_memory`: the process may have had others before."""
    global _earlier_peak
    release_memory()
    reset_high_water_mark()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    _earlier_peak = 0


def peak_memory() -> int:
    """Return the peak bytes of this process since `begin_peak_memory`, on the GPU where there is one."""
    if torch.cuda.is_available():
        return max(_earlier_peak, torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return max(_earlier_peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def read_proc_status(key: str) -> int | None:
    """Return a field of /proc/self/status in bytes."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def return_large_blocks() -> Iterator[None]:
    """Return freed tensors to the system at once, instead of keeping them for the next ones."""
    libc, threshold = load_glibc(), -3  # M_MMAP_THRESHOLD
    if libc is not None:
        libc.mallopt(threshold, 1 << 20)
    try:
        yield
    finally:
        if libc is not None:
            libc.mallopt(threshold, 32 << 20)  # where glibc's own adaptation ends


def release_memory() -> None:
    """Give back what is free, so that it does not count as used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if (libc := load_glibc()) is not None:
        libc.malloc_trim(0)


def load_glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
