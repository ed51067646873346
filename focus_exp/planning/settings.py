"""How a run is laid out on GPUs: what each of them holds under a strategy, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from focus_exp.config import Config
from focus_exp.planning.estimate import Estimate
from focus_exp.planning.hardware import GPUS_PER_NODE, NETWORK, Gpu
from focus_exp.planning.trace import Bytes

# of a 16-bit matrix; nf4 adds a float32 scale to every 64 weights, int8 one to every row
QUANTIZED = {"int8": 1 / 2, "nf4": (4 + 32 / 64) / 16}
MOST_GPUS = 1024


@dataclass(frozen=True)
class Setting:
    """What the keys of trainer.* and model.quantization choose."""

    strategy: str = "single"
    gpus: int = 1
    cpu_offload: bool = False
    checkpointing: bool = False
    quantization: str = "none"

    @property
    def name(self) -> str:
        parts = [self.strategy if self.quantization == "none" else f"{self.strategy} {self.quantization}"]
        return " + ".join([*parts, *(["cpu_offload"] if self.cpu_offload else [])])

    def overrides(self, config: Config) -> list[str]:
        """What the command line has to say for it, beside what it says."""
        nodes = math.ceil(self.gpus / GPUS_PER_NODE)
        wanted = {
            "trainer.strategy": self.strategy,
            "trainer.devices": self.gpus // nodes,
            "trainer.num_nodes": nodes,
            "trainer.cpu_offload": self.cpu_offload,
            "trainer.gradient_checkpointing": self.checkpointing,
            "trainer.accumulate": sequences(config, self.gpus) // config.trainer.batch_size,
            "model.quantization": self.quantization,
        }
        if self.strategy == "single":
            del wanted["trainer.strategy"]  # what auto is on one GPU
        groups = {"trainer": config.trainer, "model": config.model}
        given = {key: getattr(groups[key.split(".")[0]], key.split(".")[1]) for key in wanted}
        return [f"{key}={str(value).lower()}" for key, value in wanted.items() if value != given[key]]


@dataclass(frozen=True)
class Needs:
    """The worst moment of a run and the bytes that a GPU holds then, by kind; what it computes and how long that takes.

    held: "gathered" is what FSDP or a quantised base make whole for a while. main_memory: bytes that wait outside of
    all GPUs together. bound: what the seconds go to.
    """

    setting: Setting
    window: str
    held: Bytes
    main_memory: float
    flops: float
    pair_flops: float
    seconds: float
    bound: str

    @property
    def total(self) -> float:
        return sum(self.held.values())


def sequences(config: Config, gpus: int) -> int:
    """Blocks of an optimiser step: as configured, or the next number that so many processes can share evenly."""
    step = math.lcm(config.trainer.batch_size, gpus)
    return math.ceil(config.trainer.batch_size * config.trainer.accumulate / step) * step


def needs(estimate: Estimate, setting: Setting, gpu: Gpu) -> Needs:
    """Memory at the worst moment of the run, and the time of its phases for as many tokens as are configured."""
    config = estimate.config
    micro = config.trainer.batch_size // math.gcd(config.trainer.batch_size, setting.gpus)
    accumulated = sequences(config, setting.gpus) // setting.gpus // micro
    traces = estimate.traces(micro, setting.checkpointing, accumulated > 1)
    peaks = [(window, held) for trace in traces for window, held in trace.peaks.items()]
    if estimate.warm_start is not None:
        peaks += estimate.warm_start.peaks.items()
    each = [(window, placed(estimate, setting, window, held)) for window, held in peaks]
    window, held = max(each, key=lambda peak: sum(peak[1].values()))

    blocks = config.trainer.batch_size * config.trainer.accumulate
    passes = [phase.steps * blocks / micro for _, phase in estimate.phases]
    flops, pair_flops = (
        sum(count * getattr(trace, kind) for count, trace in zip(passes, traces, strict=False))
        for kind in ("flops", "pair_flops")
    )
    peak = gpu.bf16 if estimate.bf16 else gpu.float32
    seconds = {"arithmetic": flops / setting.gpus / (peak * config.plan.utilization)}
    for link, once in transfers(estimate, setting, gpu, accumulated).items():
        seconds[link] = sum(passes) / setting.gpus * once
    bound = max(seconds, key=lambda name: seconds[name])
    return Needs(setting, window, held, main_memory(estimate, setting), flops, pair_flops, seconds[bound], bound)


def placed(estimate: Estimate, setting: Setting, window: str, held: Bytes) -> Bytes:
    """What a GPU holds of what a single one would hold at a peak in `window`."""
    weights, share = estimate.weights, 1 / setting.gpus
    held = {**held, "gathered": 0.0}
    if setting.strategy == "ddp":
        held["gradients"] += weights.trainable * 4  # the buckets that are exchanged
    if setting.quantization != "none":
        held["weights"] -= weights.linear * (1 - QUANTIZED[setting.quantization] * 2 / estimate.dtype.itemsize)
        held["gathered"] = weights.matrix  # one at a time is made whole
    if setting.strategy == "fsdp":
        stays = weights.root if setting.cpu_offload else weights.base
        held["weights"] += stays * share - weights.base
        # embeddings and head, the layer at work and the next one on its way
        held["gathered"] = weights.root + 2 * weights.layer
        if estimate.trains_base:
            on_gpu = 0.0 if setting.cpu_offload else share
            held["gradients"] *= on_gpu
            held["optimizer"] *= on_gpu
            held["activations"] *= on_gpu if window == "update" else 1
            held["gathered"] += 2 * weights.layer if "backward" in window else 0  # their gradients
    return held


def main_memory(estimate: Estimate, setting: Setting) -> float:
    """Bytes that wait outside the GPUs: weights, and where they are trained gradients and AdamW's two moments."""
    copies = 4 if estimate.trains_base else 1
    return copies * (estimate.weights.base - estimate.weights.root) if setting.cpu_offload else 0.0


def transfers(estimate: Estimate, setting: Setting, gpu: Gpu, accumulated: int) -> dict[str, float]:
    """Seconds of a forward and backward pass for what has to go over each link; they run beside the arithmetic."""
    weights, others = estimate.weights, (setting.gpus - 1) / setting.gpus
    link = gpu.link if setting.gpus <= GPUS_PER_NODE else NETWORK
    if setting.strategy == "fsdp":
        moved = weights.base * (2 + estimate.trains_base)  # whole for either pass, and gradients back
        offloaded = moved / setting.gpus if setting.cpu_offload else 0.0
        return {"the links between GPUs": moved * others / link, "the link to main memory": offloaded / gpu.host}
    if setting.strategy == "ddp":
        return {"the links between GPUs": 2 * weights.trainable * 4 * others / accumulated / link}
    return {}


def sizes(most: int) -> list[int]:
    """Numbers of GPUs worth trying: powers of two, and the most there are."""
    whole = most if most <= GPUS_PER_NODE else most // GPUS_PER_NODE * GPUS_PER_NODE
    return sorted({*(2**i for i in range(most.bit_length())), whole})


def candidates(config: Config, most: int) -> Iterator[Setting]:
    """All settings on up to `most` GPUs that train what the configuration trains, fewer GPUs and changes first."""
    quantizations = ("none",) if config.regime.trains("all") else ("none", "int8", "nf4")
    counts = {*sizes(most), config.trainer.devices * config.trainer.num_nodes}
    for gpus in sorted(count for count in counts if count <= most):
        strategies = [("single" if gpus == 1 else "ddp", False), ("fsdp", False), ("fsdp", True)]
        for strategy, offload in strategies:
            for quantization in quantizations if strategy != "fsdp" else ("none",):
                for checkpointing in (False, True):
                    yield Setting(strategy, gpus, offload, checkpointing, quantization)


def as_configured(config: Config, setting: Setting) -> bool:
    """Whether `setting` leaves trainer.* and model.quantization as they are; their defaults leave the number of GPUs
    and the strategy to the plan."""
    trainer, gpus = config.trainer, config.trainer.devices * config.trainer.num_nodes
    strategies = (
        {trainer.strategy} if trainer.strategy != "auto" else {"ddp"} if gpus > 1 else {"single", "ddp", "fsdp"}
    )
    return (
        setting.strategy in strategies
        and gpus in (1, setting.gpus)
        and setting.cpu_offload == trainer.cpu_offload
        and setting.checkpointing == trainer.gradient_checkpointing
        and setting.quantization == config.model.quantization
    )
