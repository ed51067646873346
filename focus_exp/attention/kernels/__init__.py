"""Kernels of the sparse path: which there are, and which one serves."""

from focus_exp.attention.kernels.contract import Backend, CannotServe, Demand, Fused, Kernel, Whole
from focus_exp.attention.kernels.cpu import CpuFlash
from focus_exp.attention.kernels.cuda import FlashAttn, TorchFlash
from focus_exp.attention.kernels.fused import Triton
from focus_exp.attention.kernels.plain import Math

__all__ = [
    "KERNELS", "Backend", "CannotServe", "Demand", "Fused", "Kernel", "Math", "Whole", "available", "choose",
]  # fmt: skip

# in the order in which "auto" prefers them; math is there to be compared with
KERNELS: dict[str, Backend] = {
    kernel.name: kernel
    for kernel in (
        *(Triton(), FlashAttn(), TorchFlash("torch-flash"), TorchFlash("torch-fa3", "FA3")),
        *(TorchFlash("torch-fa4", "FA4"), CpuFlash(), Math()),
    )
}


def available(demand: Demand) -> dict[str, str | None]:
    """Why each kernel cannot serve, None for those that can."""
    return {name: kernel.refuses(demand) for name, kernel in KERNELS.items()}


def choose(demand: Demand, name: str = "auto") -> Backend | None:
    """The first kernel that can serve without building scores, or the named one; None where there is none."""
    if name != "auto":
        return KERNELS[name] if KERNELS[name].refuses(demand) is None else None
    return next((k for k in KERNELS.values() if k.name != "math" and k.refuses(demand) is None), None)
