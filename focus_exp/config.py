"""Schemas under every YAML file, and the checks that need more than one key.

OmegaConf refuses unknown keys and wrong types while it composes; `validate` refuses what is well-typed but
impossible, naming the key, the value and the fix.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, is_dataclass
from math import inf
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from focus_exp.errors import UserError

JOBS = ("train", "evaluate")
# keys that change where or how a run is reported, but not what it computes
NOT_HASHED = ("job", "overwrite", "runs_dir", "cache_dir", "logger", "adapter")


@dataclass
class ModelConfig:
    name: str = MISSING
    hub_id: str | None = None
    revision: str | None = None
    # a folder that save_pretrained wrote; comes before hub_id
    path: str | None = None
    # transformers config fields with model_type; without hub_id and path the weights are random, drawn from `seed`
    architecture: dict[str, Any] = field(default_factory=dict)


@dataclass
class AttentionConfig:
    name: str = MISSING
    method: str = MISSING
    groups: int = 4  # K
    routing_dim: int = 16  # d_g
    temperature: float = 0.1  # tau
    normalize: bool = True  # compare tokens and centroids by cosine
    assignment: str = "balanced"
    sinkhorn_iterations: int = 10  # N
    balance_momentum: float = 0.9
    gate: str = "log"
    gate_steepness: float = 10.0  # lambda
    gate_threshold: float = 0.5
    window: int = 128  # w
    sinks: int = 4
    top_k: int = 1
    pair_rule: str = "query_topk"
    backend: str = "auto"  # what computes hard groups: the masked path, or the sparse path on a kernel
    # how its router is trained, in any regime that trains it
    gate_steepness_start: float | None = None  # at a phase's first step, growing linearly to gate_steepness
    warm_start_blocks: int = 0  # blocks of text whose full attention the routers are fitted to first
    warm_start_steps: int = 100
    calibration_blocks: int = 0  # blocks of text on which the balance is set at the end


@dataclass
class PhaseConfig:
    train: str = "router"
    steps: int = MISSING
    learning_rate: float = MISSING
    weight_decay: float = 0.0
    warmup_steps: int = 5


@dataclass
class RegimeConfig:
    name: str = MISSING
    from_scratch: bool = False
    # in the order in which they run
    phases: dict[str, PhaseConfig] = field(default_factory=dict)


@dataclass
class DataConfig:
    name: str = MISSING
    source: str = MISSING
    hub_id: str | None = None
    subset: str | None = None
    revision: str | None = None
    text_column: str = "text"
    # a folder or a glob of UTF-8 text files, split by file
    files: str | None = None
    block_size: int = 1024
    # tokens kept of a split; null keeps all
    max_train_tokens: int | None = None
    max_test_tokens: int | None = None
    workers: int = 0


@dataclass
class EvalConfig:
    name: str = MISSING
    split: str = "test"
    window: int = 1024  # tokens a prediction may look back on, at most
    stride: int | None = None  # null: disjoint windows
    max_windows: int | None = None  # spread over the split; null: all
    batch_size: int = 1
    bootstrap_samples: int = 1000
    controls: bool = True
    # rules measured beside attention.pair_rule
    pair_rules: list[str] = field(default_factory=list)


@dataclass
class TrainerConfig:
    name: str = MISSING
    accelerator: str = "auto"
    precision: str = "auto"
    batch_size: int = 1
    accumulate: int = 1
    gradient_clip: float = 1.0
    gradient_checkpointing: bool = False
    checkpoint_every: int = 25  # optimiser steps
    log_every: int = 1
    progress: bool = True


@dataclass
class LoggerConfig:
    name: str = MISSING
    wandb: str = "auto"
    wandb_project: str = "focus_exp"
    wandb_entity: str | None = None
    csv: bool = False


@dataclass
class Config:
    job: str = "train"
    experiment: str = "adhoc"
    assets: str = "auto"
    seed: int = 0
    overwrite: bool = False
    runs_dir: str = "runs"
    # downloads and tokens; null: $FOCUS_EXP_CACHE or ~/.cache/focus_exp
    cache_dir: str | None = None
    # an adapter folder, for job=evaluate
    adapter: str | None = None
    model: ModelConfig = MISSING
    attention: AttentionConfig = MISSING
    regime: RegimeConfig = MISSING
    data: DataConfig = MISSING
    eval: EvalConfig = MISSING
    trainer: TrainerConfig = MISSING
    logger: LoggerConfig = MISSING


GROUPS = {key: schema for key, schema in get_type_hints(Config).items() if is_dataclass(schema)}

CHOICES = {
    "job": JOBS,
    "assets": ("auto", "hub", "embedded"),
    "attention.method": ("full", "focus", "window", "random_groups"),
    "attention.assignment": ("balanced", "sinkhorn", "softmax"),
    "attention.gate": ("log", "multiplicative"),
    "attention.pair_rule": ("query_topk", "share"),
    "attention.backend": ("auto", "masked", "flash-attn", "torch-flash", "cpu-flash", "math"),
    "data.source": ("hub", "files", "books"),
    "eval.split": ("validation", "test"),
    "trainer.accelerator": ("auto", "cpu", "gpu"),
    "trainer.precision": ("auto", "bf16", "float32"),
    "logger.wandb": ("auto", "online", "offline", "disabled"),
}
AT_LEAST = {
    "seed": 0,
    "attention.groups": 1,
    "attention.routing_dim": 1,
    "attention.sinkhorn_iterations": 1,
    "attention.window": 0,
    "attention.sinks": 0,
    "attention.top_k": 1,
    "attention.gate_steepness_start": 0,
    "attention.warm_start_blocks": 0,
    "attention.warm_start_steps": 1,
    "attention.calibration_blocks": 0,
    "data.block_size": 2,
    "data.max_train_tokens": 1,
    "data.max_test_tokens": 1,
    "data.workers": 0,
    "eval.window": 2,
    "eval.stride": 1,
    "eval.max_windows": 1,
    "eval.batch_size": 1,
    "eval.bootstrap_samples": 1,
    "trainer.batch_size": 1,
    "trainer.accumulate": 1,
    "trainer.checkpoint_every": 1,
    "trainer.log_every": 1,
}
ABOVE_ZERO = ("attention.temperature", "attention.gate_steepness", "trainer.gradient_clip")
SHARES = ("attention.balance_momentum", "attention.gate_threshold")


def register_schemas() -> None:
    """Put the schemas where the defaults lists of conf/ find them."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, schema in GROUPS.items():
        store.store(group=group, name=f"base_{group}", node=schema)


def parse(composed: DictConfig) -> Config:
    """The composed configuration as dataclasses, checked; UserError names key, value and fix."""
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise UserError(f"{missing[0]} has no value; give it as {missing[0]}=...")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    validate(config)
    return config


def lookup(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def validate(config: Config) -> None:
    """Refuse what no run can be made of."""
    for key, choices in CHOICES.items():
        if lookup(config, key) not in choices:
            raise UserError(f"{key}={lookup(config, key)} is not one of {', '.join(choices)}")
    for key, low in AT_LEAST.items():
        value = lookup(config, key)
        if value is not None and value < low:
            raise UserError(f"{key}={value} is impossible; use {low} or more")
    for key in ABOVE_ZERO:
        if not 0 < lookup(config, key) < inf:
            raise UserError(f"{key}={lookup(config, key)} is impossible; use a number above 0")
    for key in SHARES:
        if not 0 <= lookup(config, key) <= 1:
            raise UserError(f"{key}={lookup(config, key)} is impossible; use a number from 0 to 1")
    for rule in config.eval.pair_rules:
        if rule not in CHOICES["attention.pair_rule"]:
            raise UserError(f"eval.pair_rules holds {rule}, which is not a rule; choose query_topk or share")
    if config.adapter and config.job == "train":
        raise UserError(f"adapter={config.adapter} is for job=evaluate; add job=evaluate, or leave adapter out")
    validate_attention(config)
    validate_regime(config)
    if config.data.source == "files" and not config.data.files:
        raise UserError("data=files needs data.files=<folder or glob of text files>")
    if config.data.source == "hub" and not config.data.hub_id:
        raise UserError("data.source=hub needs data.hub_id")
    if not (config.model.path or config.model.hub_id or config.model.architecture):
        raise UserError(f"model {config.model.name} has neither path, nor hub_id, nor architecture")


def validate_attention(config: Config) -> None:
    attention, groups = config.attention, config.attention.groups
    if attention.top_k > groups:
        raise UserError(f"attention.top_k={attention.top_k} exceeds attention.groups={groups}; use 1 to {groups}")
    if attention.gate == "multiplicative" and attention.gate_threshold != 0:
        raise UserError(
            f"attention.gate_threshold={attention.gate_threshold} goes with attention.gate=log alone; "
            "set it to 0, or use attention.gate=log"
        )


def validate_regime(config: Config) -> None:
    regime = config.regime
    for name, phase in regime.phases.items():
        where = f"regime.phases.{name}"
        if phase.train not in ("router", "all"):
            raise UserError(f"{where}.train={phase.train} is not one of router, all")
        if not 0 < phase.learning_rate < inf:
            raise UserError(f"{where}.learning_rate={phase.learning_rate} is impossible; use a number above 0")
        for key, low in (("steps", 1), ("warmup_steps", 0), ("weight_decay", 0)):
            if getattr(phase, key) < low:
                raise UserError(f"{where}.{key}={getattr(phase, key)} is impossible; use {low} or more")
    trains_router_only = bool(regime.phases) and all(phase.train == "router" for phase in regime.phases.values())
    if trains_router_only and config.attention.method != "focus":
        raise UserError(
            f"regime={regime.name} trains only a router, but attention={config.attention.name} has none; "
            "use attention=focus, or regime=none to measure it as it is, or regime=finetune"
        )
    if regime.from_scratch and not any(phase.train == "all" for phase in regime.phases.values()):
        raise UserError(f"regime={regime.name} starts from random weights but no phase trains them; add train: all")


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def config_hash(config: Config) -> str:
    """Eight hex digits of everything that decides what the run computes."""
    values = {key: value for key, value in to_dict(config).items() if key not in NOT_HASHED}
    for key in ("log_every", "progress", "checkpoint_every"):
        del values["trainer"][key]
    if config.adapter:  # whose place says nothing of what is in it
        values["adapter"] = [hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(config.adapter).glob("*.safe*")]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
