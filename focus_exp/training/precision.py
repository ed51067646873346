"""Which number format the weights have and which one the arithmetic runs in, decided once per run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from focus_exp.errors import UserError


@dataclass(frozen=True)
class Precision:
    """weights: dtype the base model is loaded in; autocast: whether matrix products are cast to bfloat16.

    A frozen base is held in bfloat16; a base that is trained stays float32 under autocast. Routers are always float32.
    """

    device: torch.device
    weights: torch.dtype
    autocast: bool
    reason: str

    @property
    def name(self) -> str:
        """As records name it; numbers of one name may be compared."""
        return "bf16-mixed" if self.autocast else str(self.weights).removeprefix("torch.")

    @property
    def lightning(self) -> Literal["bf16-mixed", "32-true"]:
        return "bf16-mixed" if self.autocast else "32-true"

    def context(self) -> AbstractContextManager[object]:
        """The same arithmetic outside of Lightning."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def choose_precision(requested: str, accelerator: str, trains_base: bool) -> Precision:
    """`requested` is auto, bf16 or float32. "auto" is bf16 where the device computes it natively."""
    device = choose_device(accelerator)
    native = native_bf16(device)
    bf16 = native if requested == "auto" else requested == "bf16"
    if requested == "auto":
        reason = f"{'native' if native else 'no native'} bfloat16 on this {device.type}"
    else:
        reason = f"trainer.precision={requested}"
    return Precision(
        device, torch.bfloat16 if bf16 and not trains_base else torch.float32, bf16 and trains_base, reason
    )


def choose_device(accelerator: str) -> torch.device:
    """`accelerator` is auto, cpu or gpu. UserError when a GPU is asked for and there is none."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer.accelerator=gpu, but torch sees no CUDA device; use trainer.accelerator=auto")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are faster than float32 ones here, by what the hardware says of itself."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
