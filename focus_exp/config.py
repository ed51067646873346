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
    *("plan", "report", "dashboard", "reproduce", "sweep_status", "build_tasks"),
)


@dataclass
class ModelConfig:
    name: str = MISSING
    hub_id: str | None = option(None, "owner/name, owner/name@revision, or owner/name:Q4_K_M of a GGUF repository")
    revision: str | None = None
    path: str | None = option(None, "a folder that save_pretrained wrote, a .safetensors file in one, or a .gguf file")
    architecture: dict[str, Any] = option(
        {},
        "transformers config fields with model_type; without hub_id and path the weights are random, drawn from `seed`",
    )
    trained_by: list[str] = option(
        [], "overrides of the run here whose trained weights these are; it is run first if it is not finished"
    )
    quantization: str = option("none", "of a frozen base, by bitsandbytes", choices=("none", "int8", "nf4"))
    dtype: str | None = option(None, "of the weights as the hub stores them, which decides what a download takes")
    paper: list[str] = option([], "overrides: the setting in which the paper trains it")


@dataclass
class PhaseConfig:
    train: str = option("router", "what this phase trains", choices=("router", "lora", "all"))
    aim: str = option("text", "predictions to learn: the text's, or the frozen base's own", choices=("text", "base"))
    steps: int = option(MISSING, "0: routers are fitted to the base's attention, and not trained", least=0)
    learning_rate: float = option(MISSING, above=0)
    weight_decay: float = option(0.0, least=0)
    warmup_steps: int = option(5, least=0)


@dataclass
class LoraConfig:
    rank: int | None = option(4, "null: the one whose parameters come closest in number to those of a router", least=1)
    router_groups: int = option(FocusOptions.groups, "of that router", least=1)
    alpha: int | None = option(None, "null: twice the rank", least=1)
    dora: bool = False
    target_modules: list[str] = option(
        [], "linear layers by the ends of their names; empty: those usual for the model's family"
    )


@dataclass
class TuneConfig:
    """Runs that only differ in the learning rate of the last phase, scored on validation text; the best one is used."""

    factors: list[float] = option([], "of that learning rate, one try each; empty: it is used as it is", above=0)
    windows: int = option(16, "of eval.window tokens that a try is scored on", least=1)
    seed: int = option(0, "of the tries, which runs of other seeds share", least=0, most=MAX_SEED)


@dataclass
class RegimeConfig:
    name: str = MISSING
    from_scratch: bool = False
    steps: int | None = option(None, "what the phases take that are not given their own", least=0)
    warmup_steps: int = option(5, least=0)
    phases: dict[str, PhaseConfig] = option({}, "in the order in which they run")
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
    split_special_tokens: bool = option(
        False, "a special token's string in the text, such as <|endoftext|>, is tokenised as any other text"
    )
    files: str | None = option(None, "a folder or a glob of UTF-8 text files, split by file; of .jsonl each line")
    block_size: int = option(1024, least=2)
    max_train_tokens: int | None = option(None, "tokens kept of a split; null keeps all", least=1)
    max_test_tokens: int | None = option(None, least=1)
    workers: int = option(0, least=0)


@dataclass
class EvalConfig:
    name: str = MISSING
    split: str = option("test", choices=("validation", "test"))
    window: int = option(1024, "tokens a prediction may look back on, at most", least=2)
    stride: int | None = option(None, "null: disjoint windows", least=1)
    max_windows: int | None = option(None, "spread over the split; null: all", least=1)
    batch_size: int = option(1, least=1)
    bootstrap_samples: int = option(1000, least=1)
    controls: bool = True
    top_k: Numbers = option(
        [], "groups that a query reaches, measured beside attention.top_k; empty: all of them", least=1
    )
    pair_rules: list[str] = option([], "rules measured beside attention.pair_rule", choices=PAIR_RULES)
    adapters: list[str] = option(
        [], "of other runs, or owner/name on the hub: measured on the same windows as a router, as rows beside it"
    )
    tasks: list[str] = option(
        [],
        "measured after these windows: tasks of lm-eval, of the long-range suite (passkey, or passkey@1024 "
        "with passages of that many words), or perplexity@4096 in windows of that many tokens",
    )
    limit: int | None = option(None, "documents of a task, from its start", least=1)
    suite_limit: int | None = option(None, "of the long-range suite's tasks; null: as limit", least=1)
    num_fewshot: int | None = option(None, "null: each task's own", least=0)
    request_batch_size: int = option(8, least=1)
    suite_window: int | None = option(
        None, "tokens that the long-range suite looks beyond; null: attention.window", least=1
    )
    allow_truncation: bool = option(False, "cut requests that the model is too short for")


@dataclass
class TrainerConfig:
    name: str = MISSING
    accelerator: str = option("auto", choices=("auto", "cpu", "gpu"))
    precision: str = option("auto", choices=("auto", "bf16", "float32"))
    batch_size: int = option(1, least=1)
    accumulate: int = option(1, least=1)
    gradient_clip: float = option(1.0, above=0)
    gradient_checkpointing: bool = False
    checkpoint_every: int = option(25, "optimiser steps", least=1)
    keep_checkpoints: bool = option(False, "when a run is finished; its adapter and its model stay in any case")
    log_every: int = option(1, least=1)
    probe_every: int | None = option(
        None, "steps between looks at a router's groups; null: a twentieth of a phase; 0: never", least=0
    )
    progress: bool = True
    strategy: str = option(
        "auto",
        "of processes: auto is one where devices and num_nodes are 1, else ddp; fsdp shards all but the router",
        choices=("auto", "single", "ddp", "fsdp"),
    )
    devices: int = option(1, "of a node", least=1)
    num_nodes: int = option(1, least=1)
    cpu_offload: bool = option(False, "with fsdp: parameters wait in main memory")


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
    cache_dir: str | None = option(None, "downloads and tokens; null: $FOCUS_EXP_CACHE or ~/.cache/focus_exp")
    adapter: str | None = option(
        None, "an adapter's folder, or owner/name[@revision] of one on the hub; measured, not trained"
    )
    check_base: bool = option(True, "false: adapters may be of other weights than this base's, e.g. a quantized copy")
    arms: dict[str, list[str]] = option(
        {}, "for job=compare: name -> the settings in which that run differs; the others are compared with the first"
    )
    arm: str | None = option(None, "the only one to run")
    every_arm: list[str] = option([], "settings of all of them")
    against: list[str] = option([], "arms that the others are compared with too, beside the first one")
    sweep: str | None = option(None, "a sweep's folder, for job=sweep_status")
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


def structured(values: Any) -> Any:
    """Plain values, such as those of a run's config.yaml, under the schema, which refuses what it does not have."""
    given = OmegaConf.create(values)
    given.attention = attention_of(given.attention)
    return OmegaConf.merge(OmegaConf.structured(Config), given)


def phases_of(config: Config) -> list[tuple[str, PhaseConfig]]:
    """The named phases that this configuration really runs: without a router there is no router to train."""
    phases, routed = config.regime.phases.items(), config.has_router or config.dual is not None
    return [(name, p) for name, p in phases if p.train != "router" or routed]


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)
