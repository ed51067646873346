"""Kernels of hard routing, and the choice among them."""

from focus_exp.attention.kernels.contract import Backend, BackendUnsupported, KernelRequirements
from focus_exp.attention.kernels.cpu_sparse import CpuSparse
from focus_exp.attention.kernels.flash import Flash
from focus_exp.attention.kernels.gpu_sparse import Triton

__all__ = ["KERNELS", "Backend", "BackendUnsupported", "KernelRequirements", "select_backends"]

# in the order of preference
KERNELS: dict[str, Backend] = {kernel.name: kernel for kernel in (Triton(), CpuSparse(), Flash())}


def select_backends(requirements: KernelRequirements, name: str = "auto") -> list[Backend]:
    """Return the named kernel, or all that `auto` may choose, as far as they serve."""
    candidates = [kernel for kernel in KERNELS.values() if kernel.is_automatic] if name == "auto" else [KERNELS[name]]
    return [kernel for kernel in candidates if kernel.unsupported_reason(requirements) is None]
