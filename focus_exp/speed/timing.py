"""Clocks: two things timed in turn in one process, and the memory that each of them needs at most."""

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

_earlier = 0  # bytes: the peak of the run until a clock set the high-water mark back


def alternate(works: Mapping[str, Work], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each work: one round to warm up, then `repeats` rounds in which they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            taken = clock(work, device)
            if turn:
                seconds[name].append(taken)
    return {name: median(taken) for name, taken in seconds.items()}


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


def clock(work: Work, device: torch.device) -> float:
    """Seconds of one call, until the device is done; on CUDA by its events, which leave out the wait for the host."""
    synchronize(device)
    if device.type == "cuda":
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        done.record()
        synchronize(device)
        return began.elapsed_time(done) / 1e3
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """What `function`, a module's own, returns in a process that has done nothing before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class PeakMemory:
    """Bytes that a work holds at most, beyond what was held when this object was made; make it before the inputs.

    On CUDA by torch's allocator. On Linux by the resident set, whose high-water mark can be reset; elsewhere on a CPU
    it is not known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        release()
        self.before = held(device)

    def of(self, work: Work) -> int | None:
        """The peak while `work` runs, what already exists included."""
        release()
        keep_peak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            work()
            synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - (self.before or 0)
        with large_blocks_returned():
            if self.before is None or not reset_high_water():
                return None
            work()
            peak = resident("VmHWM")
        return None if peak is None else peak - self.before


def begin_peak() -> None:
    """Let `peak_memory` be of what comes now: a process may have had other runs before."""
    global _earlier
    release()
    reset_high_water()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    _earlier = 0


def keep_peak() -> None:
    global _earlier
    _earlier = peak_memory()


def peak_memory() -> int:
    """Bytes: the most this process has held since `begin_peak`, on the GPU where there is one."""
    if torch.cuda.is_available():
        return max(_earlier, torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return max(_earlier, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def held(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident("VmRSS")


def resident(field: str) -> int | None:
    """A field of /proc/self/status [bytes]."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Within the block freed tensors leave the resident set at once, instead of being kept for the next ones."""
    libc, threshold = glibc(), -3  # M_MMAP_THRESHOLD
    if libc is None:
        yield
        return
    libc.mallopt(threshold, 1 << 20)
    try:
        yield
    finally:
        libc.mallopt(threshold, 32 << 20)  # what glibc's own adaptation ends at


def release() -> None:
    """Give back what is free, so that it does not count as held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if (libc := glibc()) is not None:
        libc.malloc_trim(0)


def glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
