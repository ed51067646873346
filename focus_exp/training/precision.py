"""Device, dtype of the weights and arithmetic of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from focus_exp.errors import UserError


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

    @property
    def lightning(self) -> Literal["bf16-mixed", "32-true"]:
        return "bf16-mixed" if self.autocast else "32-true"

    def context(self) -> AbstractContextManager[object]:
        """Return the autocast context that Lightning would use."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def choose_precision(requested: str, accelerator: str, trains_base: bool) -> Precision:
    """Choose the precision; auto is bfloat16 if the device computes it natively.

    Args:
        requested: auto, bf16 or float32.
        accelerator: auto, cpu or gpu.
        trains_base: whether a phase trains the base's own weights.
    """
    device = choose_device(accelerator)
    native = has_native_bf16(device)
    bf16 = native if requested == "auto" else requested == "bf16"
    reason = f"trainer.precision={requested}"
    if requested == "auto":
        reason = f"{'native' if native else 'no native'} bfloat16 on this {device.type}"
    weights = torch.bfloat16 if bf16 and not trains_base else torch.float32
    return Precision(device, weights, bf16 and trains_base, reason)


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
