"""Kernels of the sparse path: which there are, and which one serves."""

from focus_exp.attention.kernels.contract import CannotServe, Demand, Kernel, Meeting, Whole
from focus_exp.attention.kernels.cpu import CpuFlash
from focus_exp.attention.kernels.cuda import FlashAttn, TorchFlash
from focus_exp.attention.kernels.flex import Flex
from focus_exp.attention.kernels.plain import Math

__all__ = ["KERNELS", "CannotServe", "Demand", "Kernel", "Math", "Meeting", "Whole", "available", "choose"]

# in the order in which "auto" prefers them; math is there to be compared with
KERNELS: dict[str, Kernel] = {k.name: k for k in (FlashAttn(), TorchFlash(), CpuFlash(), Flex(), Math())}


def available(demand: Demand) -> dict[str, str | None]:
    """Why each kernel cannot serve, None for those that can."""
    return {name: kernel.refuses(demand) for name, kernel in KERNELS.items()}


def choose(demand: Demand, name: str = "auto") -> Kernel | None:
    """The first kernel that can serve without building scores, or the named one; None where there is none."""
    if name != "auto":
        return KERNELS[name] if KERNELS[name].refuses(demand) is None else None
    able = [k for k in KERNELS.values() if k.name != "math" and k.refuses(demand) is None]
    # segments hold one group each: with several groups a token, most of their work would fall to plain arithmetic
    return next((k for k in able if demand.one_group or k.takes != "segments"), next(iter(able), None))
