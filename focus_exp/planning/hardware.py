"""GPU types: memory, arithmetic and links, as their makers state them; and how much of that a run can count on."""

from __future__ import annotations

from dataclasses import dataclass

from focus_exp.errors import UserError

GIB = 2**30
# the rest is for the CUDA context, workspaces of libraries, and what the allocator's blocks leave unused between them
USABLE = 0.9
GPUS_PER_NODE = 8
NETWORK = 50e9  # bytes/s of each GPU to other nodes: one 400 Gbit/s port each, as DGX H100 has


@dataclass(frozen=True)
class Gpu:
    """memory [GiB] as nvidia-smi lists it; matrix products in bfloat16 and float32 [FLOP/s], dense, TF32 off as torch
    has it; link to other GPUs of the node and to main memory [bytes/s], each in one direction."""

    name: str
    memory: float
    bf16: float
    float32: float
    link: float
    host: float
    source: str

    @property
    def usable(self) -> float:
        """Bytes that tensors may take."""
        return USABLE * self.memory * GIB


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("l4", 22.5, 121e12, 30.3e12, 32e9, 32e9, "NVIDIA L4 datasheet; PCIe 4"),
        Gpu("a10", 22.5, 125e12, 31.2e12, 32e9, 32e9, "NVIDIA A10 datasheet; PCIe 4"),
        Gpu("rtx_4090", 24.0, 165.2e12, 82.6e12, 32e9, 32e9, "NVIDIA Ada GPU architecture whitepaper; PCIe 4"),
        Gpu("l40s", 45.0, 362e12, 91.6e12, 32e9, 32e9, "NVIDIA L40S datasheet; PCIe 4"),
        Gpu("a100_40", 40.0, 312e12, 19.5e12, 300e9, 32e9, "NVIDIA A100 datasheet, SXM; NVLink 3, PCIe 4"),
        Gpu("a100", 80.0, 312e12, 19.5e12, 300e9, 32e9, "NVIDIA A100 80GB datasheet, SXM; NVLink 3, PCIe 4"),
        Gpu("h100", 79.6, 989e12, 67e12, 450e9, 64e9, "NVIDIA H100 datasheet, SXM; NVLink 4, PCIe 5"),
        Gpu("h200", 140.4, 989e12, 67e12, 450e9, 64e9, "NVIDIA H200 datasheet, SXM; NVLink 4, PCIe 5"),
        Gpu("b200", 179.0, 2250e12, 75e12, 900e9, 64e9, "NVIDIA HGX B200 datasheet, an eighth; NVLink 5, PCIe 5"),
    )
}


def gpu_named(name: str) -> Gpu:
    if name not in GPUS:
        raise UserError(f"plan.gpu={name} is not one of {', '.join(GPUS)}")
    return GPUS[name]
