"""Schemas under every YAML file; OmegaConf refuses unknown keys and wrong types while it composes."""

from __future__ import annotations

import copy
import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from focus_exp.attention.options import MAX_SEED, PAIR_RULES, FitOptions, FocusOptions, option
from focus_exp.config_attention import AttentionConfig, DualConfig, FocusConfig, MethodSource, attention_of
from focus_exp.config_jobs import (
    AnalyzeConfig,
    BenchConfig,
    BudgetConfig,
    GenerateConfig,
    Numbers,
    PlanConfig,
    ReportConfig,
    ReproduceConfig,
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
    base_run: list[str] = option([])
    quantization: str = option("none", choices=("none", "int8", "nf4"))
    dtype: str | None = option(None)
    paper: list[str] = option([])


@dataclass
class PhaseConfig:
    trainable: str = option("router", choices=("router", "lora", "all"))
    objective: str = option("lm", choices=("lm", "distill"))
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
    sequences: int = option(16, least=1)
    seed: int = option(0, least=0, most=MAX_SEED)


@dataclass
class RecipeConfig:
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
        return any(phase.trainable == part for phase in self.phases.values())


@dataclass
class DataConfig:
    name: str = MISSING
    source: str = option(MISSING, choices=("hub", "files", "books", "addresses"))
    hub_id: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    text_column: str = "text"
    split_special_tokens: bool = False
    files: str | None = option(None)
    seq_len: int = option(1024, least=2)
    max_train_tokens: int | None = option(None, least=1)
    max_test_tokens: int | None = option(None, least=1)
    workers: int = option(0, least=0)


@dataclass
class EvalConfig:
    name: str = MISSING
    split: str = option("test", choices=("validation", "test"))
    seq_len: int = option(1024, least=2)
    stride: int | None = option(None, least=1)
    max_sequences: int | None = option(None, least=1)
    batch_size: int = option(1, least=1)
    bootstrap_samples: int = option(1000, least=1)
    controls: bool = True
    top_k: Numbers = option([], least=1)
    pair_rules: list[str] = option([], choices=PAIR_RULES)
    adapters: list[str] = option([])
    tasks: list[str] = option([])
    limit: int | None = option(None, least=1)
    long_range_limit: int | None = option(None, least=1)
    num_fewshot: int | None = option(None, least=0)
    request_batch_size: int = option(8, least=1)
    long_range_distance: int | None = option(None, least=1)
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
    recipe: RecipeConfig = MISSING
    data: DataConfig = MISSING
    eval: EvalConfig = MISSING
    bench: BenchConfig = MISSING
    generate: GenerateConfig = MISSING
    report: ReportConfig = MISSING
    plan: PlanConfig = MISSING
    analyze: AnalyzeConfig = MISSING
    reproduce: ReproduceConfig = MISSING
    budget: BudgetConfig = MISSING
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
        return (
            self.attention if isinstance(self.attention, FitOptions) and self.attention.calibration_sequences else None
        )


GROUPS = {key: schema for key, schema in get_type_hints(Config).items() if is_dataclass(schema)}


def register_schemas() -> None:
    """Put the schemas where the defaults lists of conf/ find them."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, schema in GROUPS.items():
        if group != "attention":  # its schema is its method's
            store.store(group=group, name=f"base_{group}", node=schema)
    SourcesRegistry.instance().register(MethodSource)


# former keys -> keys of today, groups first; None: no longer a key
RENAMED: dict[str, str | None] = {
    "arm": "variant",
    "arms": None,
    "every_arm": None,
    "against": "references",
    "sweep": None,
    "regime": "recipe",
    "scale": "budget",
    "budget.models": None,
    "budget.domains": None,
    "budget.small_model": None,
    "budget.scratch": None,
    "budget.windows": "budget.eval_sequences",
    "budget.long_windows": "budget.long_eval_sequences",
    "budget.context_windows": "budget.context_sequences",
    "budget.warm_start_blocks": "budget.warm_start_sequences",
    "budget.calibration_blocks": "budget.balance_sequences",
    "budget.fit_blocks": "budget.calibration_sequences",
    "budget.fit_held_out": "budget.validation_sequences",
    "budget.rates": "budget.lr_factors",
    "budget.scratch_rates": "budget.scratch_lr_factors",
    "budget.suite_limit": "budget.long_range_limit",
    "model.trained_by": "model.base_run",
    "data.block_size": "data.seq_len",
    "eval.window": "eval.seq_len",
    "eval.max_windows": "eval.max_sequences",
    "eval.suite_limit": "eval.long_range_limit",
    "eval.suite_window": "eval.long_range_distance",
    "recipe.tune.windows": "recipe.tune.sequences",
    "recipe.phases.*.aim": "recipe.phases.*.objective",
    "recipe.phases.*.train": "recipe.phases.*.trainable",
    "attention.warm_start_blocks": "attention.warm_start_sequences",
    "attention.calibration_blocks": "attention.balance_sequences",
    "attention.fit_blocks": "attention.calibration_sequences",
    "attention.fit_held_out": "attention.validation_sequences",
    "attention.pairs": "attention.density",
    "attention.share": "attention.density",
    "attention.budget": "attention.groups_per_layer",
}
RENAMED_VALUES = {"objective": {"text": "lm", "base": "distill"}}


# former keys whose successor is written in another way -> what to type
TYPED_INSTEAD = {
    "arm": "+variant=<experiment>/<name>",
    "arms": "variants=[<names of files in conf/variant>]",
    "every_arm": "shared_variant=<file in conf/variant>",
    "against": "references=[...]",
}


def renamed_key_reason(key: str) -> str | None:
    """Return what to type instead of a former key; None for any other key."""
    if instead := TYPED_INSTEAD.get(key.partition(".")[0]):
        return f"{key.partition('.')[0]} is no longer a key. Type {instead}."
    now = key
    for old, new in RENAMED.items():
        pattern = re.escape(old).replace(r"\*", "([^.]+)")
        if (found := re.match(rf"{pattern}(?=\.|$)", now)) and new:
            now = new.replace("*", found[1] if found.groups() else "*") + now[found.end() :]
    return None if now == key else f"{key} is no longer a key. Type {now}."


def upgrade_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration under the keys of today (see RENAMED)."""
    upgraded = copy.deepcopy(values)
    external = "." in (values.get("attention") or {}).get("method", "")  # its options are its own
    for old, new in RENAMED.items():
        *groups, key = old.split(".")
        if external and groups == ["attention"]:
            continue
        parts = [upgraded]
        for group in groups:
            below = [list(part.values()) if group == "*" else [part.get(group)] for part in parts]
            parts = [part for level in below for part in level if isinstance(part, dict)]
        for part in parts:
            if key in part:
                value, name = part.pop(key), new and new.rpartition(".")[2]
                if name:
                    part[name] = RENAMED_VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value
    return upgraded


def upgrade_options(options: dict[str, Any], schema: type[Any]) -> dict[str, Any]:
    """Return a method's recorded options under the names that `schema`, its dataclass, has today."""
    names = {item.name for item in fields(schema)}
    renamed = upgrade_keys({"attention": {key: value for key, value in options.items() if key not in names}})
    return {key: value for key, value in options.items() if key in names} | renamed["attention"]


def structured(values: dict[str, Any]) -> Any:
    """Return a recorded configuration under the schema, which refuses unknown keys."""
    given = OmegaConf.create(upgrade_keys(values))
    given.attention = attention_of(given.attention)
    return OmegaConf.merge(OmegaConf.structured(Config), given)


def phases_of(config: Config) -> list[tuple[str, PhaseConfig]]:
    """The named phases that this configuration really runs: without a router there is no router to train."""
    phases, routed = config.recipe.phases.items(), config.has_router or config.dual is not None
    return [(name, p) for name, p in phases if p.trainable != "router" or routed]


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)
