"""Schemas under every YAML file; OmegaConf refuses unknown keys and wrong types while it composes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, get_type_hints

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from focus_exp.attention.focus_options import FocusOptions
from focus_exp.attention.options import MAX_SEED, PAIR_RULES, FitOptions, option
from focus_exp.config_attention import AttentionConfig, DualConfig, FocusConfig, MethodSource, attention_of
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

# each a module of that name in jobs/, with a function of that name
JOBS = (
    *("train", "evaluate", "bench", "generate", "compare", "analyze"),
    *("plan", "report", "dashboard", "reproduce", "build_tasks"),
)


@dataclass
class ModelConfig:
    name: str = MISSING
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = option(None)
    architecture: dict[str, Any] = option({})
    trained_by: list[str] = option([])
    quantization: str = option("none", choices=("none", "int8", "nf4"))
    dtype: str | None = option(None)
    paper: list[str] = option([])


@dataclass
class PhaseConfig:
    train: str = option("router", choices=("router", "lora", "all"))
    aim: str = option("text", choices=("text", "base"))
    steps: int = option(MISSING, least=0)
    learning_rate: float = option(MISSING, above=0)
    weight_decay: float = option(0.0, least=0)
    warmup_steps: int = option(5, least=0)


@dataclass
class LoraConfig:
    rank: int | None = option(4, least=1)
    router_groups: int = option(FocusOptions.groups, least=1)
    alpha: int | None = option(None, least=1)
    dora: bool = False
    target_modules: list[str] = option([])


@dataclass
class TuneConfig:
    """Runs that only differ in the learning rate of the last phase, scored on validation text; the best one is used."""

    factors: list[float] = option([], above=0)
    windows: int = option(16, least=1)
    seed: int = option(0, least=0, most=MAX_SEED)


@dataclass
class RegimeConfig:
    name: str = MISSING
    from_scratch: bool = False
    steps: int | None = option(None, least=0)
    warmup_steps: int = option(5, least=0)
    phases: dict[str, PhaseConfig] = option({})
    tune: TuneConfig = field(default_factory=TuneConfig)
    # for phases that train it
    lora: LoraConfig = field(default_factory=LoraConfig)

    def trains(self, part: str) -> bool:
        """Whether any phase trains `part`: router, lora or all."""
        return any(phase.train == part for phase in self.phases.values())


@dataclass
class DataConfig:
    name: str = MISSING
    source: str = option(MISSING, choices=("hub", "files", "books", "addresses"))
    hub_id: str | None = None
    subset: str | None = None
    revision: str | None = None
    text_column: str = "text"
    split_special_tokens: bool = False
    files: str | None = option(None)
    block_size: int = option(1024, least=2)
    max_train_tokens: int | None = option(None, least=1)
    max_test_tokens: int | None = option(None, least=1)
    workers: int = option(0, least=0)


@dataclass
class EvalConfig:
    name: str = MISSING
    split: str = option("test", choices=("validation", "test"))
    window: int = option(1024, least=2)
    stride: int | None = option(None, least=1)
    max_windows: int | None = option(None, least=1)
    batch_size: int = option(1, least=1)
    bootstrap_samples: int = option(1000, least=1)
    controls: bool = True
    top_k: Numbers = option([], least=1)
    pair_rules: list[str] = option([], choices=PAIR_RULES)
    adapters: list[str] = option([])
    tasks: list[str] = option([])
    limit: int | None = option(None, least=1)
    suite_limit: int | None = option(None, least=1)
    num_fewshot: int | None = option(None, least=0)
    request_batch_size: int = option(8, least=1)
    suite_window: int | None = option(None, least=1)
    allow_truncation: bool = option(False)


@dataclass
class TrainerConfig:
    name: str = MISSING
    accelerator: str = option("auto", choices=("auto", "cpu", "gpu"))
    precision: str = option("auto", choices=("auto", "bf16", "float32"))
    batch_size: int = option(1, least=1)
    accumulate: int = option(1, least=1)
    gradient_clip: float = option(1.0, above=0)
    gradient_checkpointing: bool = False
    checkpoint_every: int = option(25, least=1)
    keep_checkpoints: bool = option(False)
    log_every: int = option(1, least=1)
    probe_every: int | None = option(None, least=0)
    progress: bool = True
    strategy: str = option("auto", choices=("auto", "single", "ddp", "fsdp"))
    devices: int = option(1, least=1)
    num_nodes: int = option(1, least=1)
    cpu_offload: bool = option(False)


@dataclass
class LoggerConfig:
    name: str = MISSING
    wandb: str = option("auto", choices=("auto", "online", "offline", "disabled"))
    wandb_project: str = "focus_exp"
    wandb_entity: str | None = None
    csv: bool = False


@dataclass
class Config:
    job: str = option("train", choices=JOBS)
    experiment: str = "adhoc"
    assets: str = option("auto", choices=("auto", "hub", "embedded"))
    seed: int = option(0, least=0, most=MAX_SEED)
    overwrite: bool = False
    runs_dir: str = "runs"
    cache_dir: str | None = option(None)
    adapter: str | None = option(None)
    check_base: bool = True
    variant: str | None = None
    variants: list[str] = option([])
    shared_variant: str | None = None
    references: list[str] = option([])
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

    @property
    def dual(self) -> DualConfig | None:
        """attention.* where it has two encoders."""
        return self.attention if isinstance(self.attention, DualConfig) else None

    @property
    def fitting(self) -> FitOptions | None:
        """attention.* where that is fitted to the base, layer by layer, before any phase."""
        return self.attention if isinstance(self.attention, FitOptions) and self.attention.fit_blocks else None


GROUPS = {key: schema for key, schema in get_type_hints(Config).items() if is_dataclass(schema)}


def register_schemas() -> None:
    """Put the schemas where the defaults lists of conf/ find them."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, schema in GROUPS.items():
        if group != "attention":  # its schema is its method's
            store.store(group=group, name=f"base_{group}", node=schema)
    SourcesRegistry.instance().register(MethodSource)


# keys of earlier records -> their names today; None: no longer a key
RENAMED = {
    "arm": "variant",
    "arms": None,
    "every_arm": None,
    "against": "references",
    "scale.models": None,
    "scale.domains": None,
    "scale.small_model": None,
    "scale.scratch": None,
    "sweep": None,
}


def upgrade_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration under the keys of today (see RENAMED)."""
    upgraded = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for old, new in RENAMED.items():
        group, _, key = old.rpartition(".")
        part = upgraded.get(group, {}) if group else upgraded
        if key in part:
            value = part.pop(key)
            if new is not None:
                part[new] = value
    return upgraded


def structured(values: dict[str, Any]) -> Any:
    """Return a recorded configuration under the schema, which refuses unknown keys."""
    given = OmegaConf.create(upgrade_keys(values))
    given.attention = attention_of(given.attention)
    return OmegaConf.merge(OmegaConf.structured(Config), given)


def phases_of(config: Config) -> list[tuple[str, PhaseConfig]]:
    """The named phases that this configuration really runs: without a router there is no router to train."""
    phases, routed = config.regime.phases.items(), config.has_router or config.dual is not None
    return [(name, p) for name, p in phases if p.train != "router" or routed]


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)
