"""Kernels of the sparse path, and the choice among them."""

from focus_exp.attention.kernels.contract import (
    Backend,
    BackendUnsupported,
    Fused,
    Kernel,
    KernelRequirements,
    RowResult,
)
from focus_exp.attention.kernels.cpu import CpuFlash
from focus_exp.attention.kernels.cpu_sparse import CpuSparse
from focus_exp.attention.kernels.cuda import FlashAttn, TorchFlash
from focus_exp.attention.kernels.fused import Triton
from focus_exp.attention.kernels.plain import Math

__all__ = [
    "KERNELS", "Backend", "BackendUnsupported", "Fused", "Kernel", "KernelRequirements", "Math", "RowResult",
    "select_backend", "select_backends", "unsupported_reasons",
]  # fmt: skip

# in the order of preference; math is the reference that the others are compared with
KERNELS: dict[str, Backend] = {
    kernel.name: kernel
    for kernel in (
        *(Triton(), FlashAttn(), TorchFlash("torch-flash"), TorchFlash("torch-fa3", "FA3")),
        *(TorchFlash("torch-fa4", "FA4"), CpuSparse(), CpuFlash(), Math()),
    )
}


def unsupported_reasons(requirements: KernelRequirements) -> dict[str, str | None]:
    """Return by kernel why it does not serve; None for those that do."""
    return {name: kernel.unsupported_reason(requirements) for name, kernel in KERNELS.items()}


def select_backends(requirements: KernelRequirements, name: str = "auto") -> list[Backend]:
    """Return the named kernel, or all that build no score matrix, as far as they serve."""
    candidates = [KERNELS[name]] if name != "auto" else [k for k in KERNELS.values() if k.name != "math"]
    return [kernel for kernel in candidates if kernel.unsupported_reason(requirements) is None]


def select_backend(requirements: KernelRequirements, name: str = "auto") -> Backend | None:
    """Return the first kernel of `select_backends`; None where none serves."""
    return next(iter(select_backends(requirements, name)), None)
