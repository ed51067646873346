"""Kernels of hard routing, and the choice among them."""

from focus_exp.attention.kernels.contract import Backend, BackendUnsupported, KernelRequirements
from focus_exp.attention.kernels.cpu_sparse import CpuSparse
from focus_exp.attention.kernels.gpu_sparse import Triton

__all__ = ["KERNELS", "Backend", "BackendUnsupported", "KernelRequirements", "select_backends"]

# in the order of preference
KERNELS: dict[str, Backend] = {kernel.name: kernel for kernel in (Triton(), CpuSparse())}


def select_backends(requirements: KernelRequirements, name: str = "auto") -> list[Backend]:
    """Return the named kernel, or all, as far as they serve."""
    candidates = list(KERNELS.values()) if name == "auto" else [KERNELS[name]]
    return [kernel for kernel in candidates if kernel.unsupported_reason(requirements) is None]
