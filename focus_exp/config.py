"""Schemas under every YAML file, and the checks that need more than one key.

OmegaConf refuses unknown keys and wrong types while it composes; `validate` refuses what is well-typed but
impossible, naming the key, the value and the fix.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from focus_exp.errors import UserError

JOBS = ("train", "evaluate")
ASSETS = ("auto", "hub", "embedded")
METHODS = ("full", "focus", "window", "random_groups")
ASSIGNMENTS = ("balanced", "sinkhorn", "softmax")
GATES = ("log", "multiplicative")
PAIR_RULES = ("share", "query_topk")
TRAINABLE = ("router", "all")
OBJECTIVES = ("language_model", "distill")
PRECISIONS = ("auto", "bf16", "float32")
WANDB_MODES = ("auto", "online", "offline", "disabled")


@dataclass
class ModelConfig:
    name: str = MISSING
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    # transformers config fields with model_type; without a hub_id the weights are random, seeded by `seed`
    architecture: dict[str, Any] = field(default_factory=dict)


@dataclass
class AttentionConfig:
    name: str = MISSING
    method: str = MISSING
    groups: int = 4
    routing_dim: int = 16
    temperature: float = 0.1
    assignment: str = "balanced"
    sinkhorn_iterations: int = 10
    balance_momentum: float = 0.9
    gate: str = "log"
    gate_steepness: float = 10.0
    gate_threshold: float = 0.5
    window: int = 128
    sinks: int = 4
    top_k: int = 1
    pair_rule: str = "query_topk"


@dataclass
class PhaseConfig:
    train: str = "router"
    steps: int = MISSING
    learning_rate: float = MISSING
    weight_decay: float = 0.0
    warmup_steps: int = 0
    objective: str = "language_model"


@dataclass
class RegimeConfig:
    name: str = MISSING
    from_scratch: bool = False
    # blocks whose attention initialises the centroids before training (0: random initialisation)
    warm_start_blocks: int = 0
    warm_start_steps: int = 100
    # training blocks that calibrate the balance potentials once more, router frozen
    calibration_blocks: int = 0
    phases: list[PhaseConfig] = field(default_factory=list)


@dataclass
class DataConfig:
    name: str = MISSING
    source: str = MISSING
    hub_id: str | None = None
    subset: str | None = None
    revision: str | None = None
    text_column: str = "text"
    # a folder or a glob of text files, split by file
    files: str | None = None
    block_size: int = 1024
    # tokens kept per split; null keeps all
    max_train_tokens: int | None = None
    max_test_tokens: int | None = None
    workers: int = 0


@dataclass
class EvalConfig:
    name: str = MISSING
    split: str = "test"
    window: int = 1024
    stride: int | None = None
    max_windows: int | None = None
    batch_size: int = 1
    bootstrap_samples: int = 1000
    controls: bool = True


@dataclass
class TrainerConfig:
    name: str = MISSING
    accelerator: str = "auto"
    devices: int = 1
    precision: str = "auto"
    batch_size: int = 1
    accumulate: int = 1
    gradient_clip: float = 1.0
    gradient_checkpointing: bool = False
    checkpoint_every: int = 25
    log_every: int = 1
    progress: bool = True


@dataclass
class LoggerConfig:
    name: str = MISSING
    wandb_mode: str = "disabled"
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
    cache_dir: str | None = None
    # an adapter folder to evaluate (job=evaluate) or to start from
    adapter: str | None = None
    model: ModelConfig = MISSING
    attention: AttentionConfig = MISSING
    regime: RegimeConfig = MISSING
    data: DataConfig = MISSING
    eval: EvalConfig = MISSING
    trainer: TrainerConfig = MISSING
    logger: LoggerConfig = MISSING
