"""Schemas under every YAML file; OmegaConf refuses unknown keys and wrong types while it composes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from focus_exp.attention.focus_options import FocusOptions
from focus_exp.config_attention import AttentionConfig, FocusConfig, MethodSource, attention_of
from focus_exp.config_jobs import (
    AnalyzeConfig,
    BenchConfig,
    GenerateConfig,
    Numbers,
    PlanConfig,
    ReportConfig,
    ReproduceConfig,
    ScaleConfig,
)

# keys that change where or how a run is reported, but not what it computes
NOT_HASHED = (
    *("job", "arm", "overwrite", "runs_dir", "cache_dir", "logger", "adapter"),
    *("report", "plan", "reproduce", "scale", "sweep"),
)
MODEL_NOT_HASHED = ("dtype", "paper")
TRAINER_NOT_HASHED = (
    *("name", "log_every", "progress", "checkpoint_every", "keep_checkpoints", "probe_every"),
    *("strategy", "devices", "num_nodes", "cpu_offload"),
)


@dataclass
class ModelConfig:
    name: str = MISSING
    hub_id: str | None = None
    revision: str | None = None
    # a folder that save_pretrained wrote; comes before hub_id
    path: str | None = None
    # transformers config fields with model_type; without hub_id and path the weights are random, drawn from `seed`
    architecture: dict[str, Any] = field(default_factory=dict)
    # overrides of the run here whose trained weights these are; it is run first if it is not finished
    trained_by: list[str] = field(default_factory=list)
    quantization: str = "none"  # int8 or nf4: of a frozen base, by bitsandbytes
    dtype: str | None = None  # of the weights as the hub stores them, which decides what a download takes
    paper: list[str] = field(default_factory=list)  # overrides: the setting in which the paper trains it


@dataclass
class PhaseConfig:
    train: str = "router"  # or lora, or all
    steps: int = MISSING
    learning_rate: float = MISSING
    weight_decay: float = 0.0
    warmup_steps: int = 5


@dataclass
class LoraConfig:
    rank: int | None = 4  # null: the one whose parameters come closest in number to those of a router
    router_groups: int = FocusOptions.groups  # of that router
    alpha: int | None = None  # null: twice the rank
    dora: bool = False
    # linear layers by the ends of their names; empty: those usual for the model's family
    target_modules: list[str] = field(default_factory=list)


@dataclass
class RegimeConfig:
    name: str = MISSING
    from_scratch: bool = False
    # what the phases take that are not given their own
    steps: int | None = None
    warmup_steps: int = 5
    # in the order in which they run
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    # for phases that train it
    lora: LoraConfig = field(default_factory=LoraConfig)

    def trains(self, part: str) -> bool:
        """Whether any phase trains `part`: router, lora or all."""
        return any(phase.train == part for phase in self.phases.values())


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
    # groups that a query reaches, measured beside attention.top_k; empty: all of them
    top_k: Numbers = field(default_factory=Numbers)
    # rules measured beside attention.pair_rule
    pair_rules: list[str] = field(default_factory=list)
    # measured after these windows: tasks of lm-eval, of the long-range suite (passkey, or passkey@1024 with passages of
    # that many words), or perplexity@4096 in windows of that many tokens
    tasks: list[str] = field(default_factory=list)
    limit: int | None = None  # documents of a task, from its start
    num_fewshot: int | None = None  # null: each task's own
    request_batch_size: int = 8
    suite_window: int | None = None  # tokens that the long-range suite looks beyond; null: attention.window
    allow_truncation: bool = False  # cut requests that the model is too short for


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
    keep_checkpoints: bool = False  # when a run is finished; its adapter and its model stay in any case
    log_every: int = 1
    probe_every: int | None = None  # steps between looks at a router's groups; null: a twentieth of a phase; 0: never
    progress: bool = True
    # processes: auto is one where devices and num_nodes are 1, else ddp; fsdp shards the base, the router is replicated
    strategy: str = "auto"
    devices: int = 1  # of a node
    num_nodes: int = 1
    cpu_offload: bool = False  # with fsdp: parameters wait in main memory


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
    # for job=compare: name -> the settings in which that run differs; the others are compared with the first
    arms: dict[str, list[str]] = field(default_factory=dict)
    arm: str | None = None  # the only one to run
    every_arm: list[str] = field(default_factory=list)  # settings of all of them
    sweep: str | None = None  # a sweep's folder, for job=sweep_status
    model: ModelConfig = MISSING
    attention: AttentionConfig = MISSING
    regime: RegimeConfig = MISSING
    data: DataConfig = MISSING
    eval: EvalConfig = MISSING
    bench: BenchConfig = MISSING
    generate: GenerateConfig = MISSING
    report: ReportConfig = MISSING
    plan: PlanConfig = MISSING
    analyze: AnalyzeConfig = MISSING
    reproduce: ReproduceConfig = MISSING
    scale: ScaleConfig = MISSING
    trainer: TrainerConfig = MISSING
    logger: LoggerConfig = MISSING

    @property
    def has_router(self) -> bool:
        """Whether the attention has a router to train."""
        return isinstance(self.attention, FocusConfig)

    @property
    def focus(self) -> FocusConfig:
        """attention.* where it has a router."""
        assert isinstance(self.attention, FocusConfig), self.attention
        return self.attention


GROUPS = {key: schema for key, schema in get_type_hints(Config).items() if is_dataclass(schema)}


def register_schemas() -> None:
    """Put the schemas where the defaults lists of conf/ find them."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, schema in GROUPS.items():
        if group != "attention":  # its schema is its method's
            store.store(group=group, name=f"base_{group}", node=schema)
    SourcesRegistry.instance().register(MethodSource)


def structured(values: Any) -> Any:
    """Plain values, such as those of a run's config.yaml, under the schema, which refuses what it does not have."""
    given = OmegaConf.create(values)
    given.attention = attention_of(given.attention)
    return OmegaConf.merge(OmegaConf.structured(Config), given)


def phases_of(config: Config) -> list[tuple[str, PhaseConfig]]:
    """The named phases that this configuration really runs: without a router there is no router to train."""
    phases = config.regime.phases.items()
    return [(name, p) for name, p in phases if p.train != "router" or config.has_router]


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def config_hash(config: Config) -> str:
    """Eight hex digits of everything that decides what the run computes.

    What stands at the schema's default is left out, so a key that is new tomorrow leaves the runs of today their names;
    for the same reason a default, once released, must not change its meaning.
    """
    values = {key: value for key, value in chosen(config).items() if key not in NOT_HASHED}
    values["model"] = {key: value for key, value in values["model"].items() if key not in MODEL_NOT_HASHED}
    values["trainer"] = {key: value for key, value in values["trainer"].items() if key not in TRAINER_NOT_HASHED}
    if values["attention"].get("seed") == config.seed:
        del values["attention"]["seed"]
    if config.adapter:  # whose place says nothing of what is in it
        values["adapter"] = [hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(config.adapter).glob("*.safe*")]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def chosen(config: Any) -> dict[str, Any]:
    """The values that differ from their schema's defaults."""
    values = {}
    for item in fields(config):
        value = getattr(config, item.name)
        default = item.default if item.default_factory is MISSING_DEFAULT else item.default_factory()
        if is_dataclass(value):
            values[item.name] = chosen(value)
        elif isinstance(value, dict):
            values[item.name] = {key: chosen(part) if is_dataclass(part) else part for key, part in value.items()}
        elif value != default:
            values[item.name] = value
    return {key: value for key, value in values.items() if value != {}}
