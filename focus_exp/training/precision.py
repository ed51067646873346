"""Device, dtype of the weights and arithmetic of a run."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from focus_exp.attention.kernels.measured import Times, least_seconds, read_or_measure
from focus_exp.errors import UserError
from focus_exp.results.environment import cpu_name

MAX_WIDTH = 1024  # of the measured product, so that it takes under half a second
REPEATS = 3
DESCRIPTION = re.compile(r"\b(float32|bfloat16|bf16-mixed) \((.+?)\)")  # of str(Precision)


@dataclass(frozen=True)
class Precision:
    """Number formats of a run; routers are always float32.

    Args:
        device: where the run computes.
        weights: dtype of the loaded base; bfloat16 only if it stays frozen.
        autocast: compute matrix products in bfloat16, over float32 weights.
        reason: why, for the log.
    """

    device: torch.device
    weights: torch.dtype
    autocast: bool
    reason: str

    @property
    def name(self) -> str:
        """Name in records; results of one name are comparable."""
        return "bf16-mixed" if self.autocast else str(self.weights).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    @property
    def lightning(self) -> Literal["bf16-mixed", "32-true"]:
        return "bf16-mixed" if self.autocast else "32-true"

    def context(self) -> AbstractContextManager[object]:
        """Return the autocast context that Lightning would use."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def choose_precision(
    requested: str,
    accelerator: str,
    trains_base: bool,
    *,
    width: int = 1024,
    cache: Path | None = None,
    earlier: str = "",
) -> Precision:
    """Choose the precision; auto is bfloat16 where the device computes it natively, and a CPU faster than float32.

    Args:
        requested: auto, bf16 or float32.
        accelerator: auto, cpu or gpu.
        trains_base: whether a phase trains the base's own weights.
        width: of the model, for the measurement.
        cache: folder that keeps what was measured; None measures nothing and goes by the hardware.
        earlier: `Record.device` of the run that is resumed, whose precision auto keeps.
    """
    device = choose_device(accelerator)
    bf16, reason = requested == "bf16", f"trainer.precision={requested}"
    if requested == "auto":
        bf16 = has_native_bf16(device)
        reason = f"{'native' if bf16 else 'no native'} bfloat16 on this {device.type}"
        if before := DESCRIPTION.search(earlier):
            bf16, reason = before[1] != "float32", before[2]
        elif bf16 and device.type == "cpu" and cache is not None:
            times = measure_products(min(width, MAX_WIDTH), cache)
            bf16 = times["bfloat16"] < times["float32"]
            ratio = max(times.values()) / min(times.values())
            reason = f"{ratio:.1f} times as fast as {'float32' if bf16 else 'bfloat16'} on this cpu"
    weights = torch.bfloat16 if bf16 and not trains_base else torch.float32
    return Precision(device, weights, bf16 and trains_base, reason)


def measure_products(width: int, cache: Path) -> Times:
    """Return the seconds of a matrix product in each dtype, measured once a machine, torch and number of threads.

    The product is that of an MLP's first layer, of 1,024 tokens.
    """
    key = f"{cpu_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads, width {width}"

    def measure() -> Times:
        works = {}
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.ones(1024, width, dtype=dtype), torch.ones(4 * width, width, dtype=dtype)
            works[str(dtype).removeprefix("torch.")] = partial(torch.nn.functional.linear, x, weight)
        return least_seconds(works, REPEATS)

    return read_or_measure(cache / "matrix_products.json", key, measure)


def choose_device(accelerator: str) -> torch.device:
    """Choose the device; UserError if a GPU is asked for and there is none."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError(
            "trainer.accelerator=gpu needs a GPU, and torch sees no CUDA device. Use trainer.accelerator=auto."
        )
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def has_native_bf16(device: torch.device) -> bool:
    """Return whether the hardware has bfloat16 matrix products."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
