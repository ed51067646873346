"""Schemas under every YAML file of conf/, whose comments explain the keys; and the former names of keys.

OmegaConf refuses unknown keys and wrong types while it composes; checks.py refuses values that do not go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from focus_exp.attention.options import (
    MAX_SEED,
    FocusDualOptions,
    FocusOptions,
    Options,
    option,
)
from focus_exp.errors import UserError

# job -> the module of jobs/ with a function of that name
_MODULES = ("train", "evaluate", "bench", "generate", "compare", "analyze", "plan", "report", "reproduce")
JOBS = {name: name for name in _MODULES} | {"dashboard": "report", "build_tasks": "evaluate"}
GPUS = ("l4", "rtx_4090", "l40s", "a100_40", "a100", "h100", "h200", "b200")
BACKENDS = ("auto", "masked", "triton", "cpu", "flash")


def conf_dir() -> str:
    """Return the folder conf/: next to the package in a source tree, inside it when installed."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "conf", here / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError("conf/ is neither next to the package nor in it. Install focus_exp again.")


@cache
def shipped(group: str) -> dict[str, Any]:
    """Return the values of every YAML file of a group, by its name."""
    paths = sorted(Path(conf_dir(), group).glob("*.yaml"))
    return {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in paths}


def is_shipped(group: str, hub_id: str | None) -> bool:
    """Return whether a file of the group has this Hub repository, which an embedded substitute may replace."""
    return any(values.get("hub_id") == hub_id for values in shipped(group).values())


@dataclass
class AttentionConfig(Options):
    """attention.* of full attention, which every method has."""

    name: str = MISSING
    method: str = MISSING
    window: int = option(128, least=0)
    backend: str = option("auto", choices=BACKENDS)


@dataclass
class FocusConfig(FocusOptions, AttentionConfig):
    """attention.* of Focus."""


@dataclass
class DualConfig(FocusDualOptions, AttentionConfig):
    """attention.* of Focus with two encoders."""


# known without importing the method, which takes seconds for torch
ATTENTION: dict[str, type[AttentionConfig]] = {"full": AttentionConfig, "focus": FocusConfig, "focus_dual": DualConfig}


@cache
def find_schema(method: str) -> type[AttentionConfig]:
    """Return the schema of attention.* for a method: a name, or the dotted path of a class.

    Raises:
        UserError: there is no such method.
    """
    if method in ATTENTION:
        return ATTENTION[method]
    cls = find_method(method)
    return make_dataclass(f"{cls.__name__}Config", [], bases=(cls.options, AttentionConfig))


def find_method(method: str) -> type[Any]:
    """Return the class of a method; UserError if there is none."""
    from focus_exp.attention.registry import find

    try:
        return find(method)
    except ValueError as error:
        raise UserError(str(error)) from error


def is_fitted(method: str) -> bool:
    """Return whether the layers of a method are fitted to the base, by recipe.fit."""
    return method == "focus_dual" if method in ATTENTION else bool(find_method(method).is_fitted)


def build_attention(values: dict[str, Any]) -> AttentionConfig:
    """Return attention.* under the schema of `values["method"]`, which refuses other options."""
    schema = OmegaConf.create({"attention": OmegaConf.structured(find_schema(values["method"]))})
    attention = OmegaConf.to_object(OmegaConf.merge(schema, {"attention": values}).attention)
    assert isinstance(attention, AttentionConfig)
    return attention


def get_method_options(attention: AttentionConfig) -> dict[str, Any]:
    """Return the options of attention.* that the method's class takes."""
    return {item.name: getattr(attention, item.name) for item in fields(find_method(attention.method).options)}


@dataclass
class ModelConfig:
    name: str = MISSING
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = option(None)
    architecture: dict[str, Any] = option({})
    base_run: list[str] = option([])
    quantization: str = option("none", choices=("none", "int8", "nf4"))


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
    target_modules: list[str] = option([])


@dataclass
class TuneConfig:
    factors: list[float] = option([], above=0)
    sequences: int = option(16, least=1)
    seed: int = option(0, least=0, most=MAX_SEED)


@dataclass
class FitConfig:
    sequences: int = option(64, least=0)
    validation_sequences: int = option(16, least=1)
    steps: int = option(600, least=4)
    learning_rate: float = option(0.005, above=0)
    importance: str = option("loss", choices=("loss", "attention"))
    ignored_means: int = option(0, least=0)
    summed_queries: int = option(1, least=1)


@dataclass
class RouterConfig:
    warm_start_sequences: int = option(0, least=0)
    warm_start_steps: int = option(100, least=1)
    balance_sequences: int = option(0, least=0)
    gate_steepness_start: float | None = option(None, least=0)
    centroid_decay: float = option(0.999, least=0, most=1)
    recluster_every: int = option(100, least=1)


@dataclass
class RecipeConfig:
    name: str = MISSING
    from_scratch: bool = False
    steps: int | None = option(None, least=0)
    warmup_steps: int = option(5, least=0)
    phases: dict[str, PhaseConfig] = option({})
    tune: TuneConfig = field(default_factory=TuneConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fit: FitConfig | None = option(None)  # of a method that is not fitted
    router: RouterConfig | None = option(None)  # of a method without a router

    def trains(self, part: str) -> bool:
        """Return whether any phase trains `part`: router, lora or all."""
        return any(phase.trainable == part for phase in self.phases.values())


@dataclass
class DataConfig:
    name: str = MISSING
    source: str = option(MISSING, choices=("hub", "files", "books", "addresses", "mixture"))
    hub_id: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    text_column: str = "text"
    files: str | None = option(None)
    parts: list[str] = option([])
    seq_len: int = option(1024, least=2)
    max_train_tokens: int | None = option(None, least=1)
    max_test_tokens: int | None = option(None, least=1)
    hidden_facts: bool = False


@dataclass
class EvalConfig:
    name: str = MISSING
    data: str | None = option(None)
    split: str = option("test", choices=("validation", "test"))
    seq_len: int = option(1024, least=2)
    max_sequences: int | None = option(None, least=1)
    batch_size: int = option(1, least=1)
    controls: bool = True
    bounds: bool = True
    top_k: list[int] = option([], least=1)
    adapters: list[str] = option([])
    tasks: list[str] = option([])
    limit: int | None = option(None, least=1)
    long_range_limit: int | None = option(None, least=1)
    num_fewshot: int | None = option(None, least=0)
    request_batch_size: int = option(8, least=1)
    long_range_distance: int | None = option(None, least=1)


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
    checkpoint_minutes: float | None = option(None, least=0)
    log_every: int = option(1, least=1)
    probe_every: int | None = option(None, least=0)
    progress: bool = True
    strategy: str = option("auto", choices=("auto", "single", "ddp", "fsdp"))
    devices: int = option(1, least=1)
    num_nodes: int = option(1, least=1)


@dataclass
class LoggerConfig:
    name: str = MISSING
    wandb: str = option("auto", choices=("auto", "online", "offline", "disabled"))
    wandb_project: str = "focus_exp"
    wandb_entity: str | None = None


@dataclass
class BenchConfig:
    name: str = MISSING
    lengths: list[int] = option([], least=1)
    prefill_lengths: list[int] = option([], least=1)
    step_lengths: list[int] = option([], least=1)
    decode_lengths: list[int] = option([], least=1)
    groups: list[int] = option([4, 8], least=1)
    methods: list[str] = option([])
    top_k: list[int] = option([1], least=1)
    compile: list[str] = option([], choices=("default", "reduce-overhead", "max-autotune"))
    graphs: bool = option(False)
    dtype: str = option("bf16", choices=("bf16", "float32"))
    repeats: int = option(7, least=1)
    routed_tokens: int = option(16_384, least=2)
    quality: bool = option(False)


@dataclass
class GenerateConfig:
    name: str = MISSING
    prompts: int = option(4, least=1)
    prompt_tokens: int = option(384, least=1)
    new_tokens: int = option(128, least=1)
    top_k: list[int] = option([])


@dataclass
class ReportConfig:
    name: str = MISSING
    collect: str | None = option(None)


@dataclass
class PlanConfig:
    name: str = MISSING
    gpu: str = option("h100", choices=GPUS)
    gpus: int | None = option(None, least=1)
    utilization: float = option(0.4, least=0.01, most=1)


@dataclass
class AnalyzeConfig:
    name: str = MISSING
    tokens: int = option(16_384, least=2)
    passage_tokens: int = option(512, least=2)
    pairs: int = option(20, least=0)
    others: list[str] = option([])


@dataclass
class ReproduceConfig:
    name: str = MISSING
    tables: dict[str, list[str]] = option({})
    assets: str | None = option(None, choices=("auto", "hub", "embedded"))
    only: list[str] = option([])


@dataclass
class Config:
    job: str = option("train", choices=tuple(JOBS))
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
    budget: dict[str, Any] = option({})
    trainer: TrainerConfig = MISSING
    logger: LoggerConfig = MISSING

    @property
    def scored_routings(self) -> list[dict[str, Any]]:
        """Return what `set_routing` is given for every hard routing that is scored."""
        configured, top_ks = self.attention.routing, self.eval.top_k
        if not self.attention.is_soft:
            return [configured]
        return [x for x in self.attention.routings() if not top_ks or x["top_k"] in (*top_ks, configured["top_k"])]

    @property
    def answer_distance(self) -> int:
        """Return the distance [tokens] that answers of the long-range suite lie beyond."""
        return self.eval.long_range_distance or self.attention.window

    @property
    def fitting(self) -> FitConfig | None:
        """Return recipe.fit of a method that is fitted to the base before any phase; None for other methods."""
        return self.recipe.fit if self.recipe.fit and self.recipe.fit.sequences else None

    @property
    def balance_sequences(self) -> int:
        """Return the number of sequences on which the groups are balanced after training."""
        if self.recipe.router:
            return self.recipe.router.balance_sequences
        return self.recipe.fit.sequences if self.recipe.fit and self.phases and self.attention.is_trainable else 0

    @property
    def is_trained(self) -> bool:
        """Return whether parameters are trained or fitted, not loaded or left at their initialization."""
        return not self.adapter and bool(self.fitting or self.phases)

    @property
    def scored_data(self) -> DataConfig:
        """Return data.* of the held-out text: that of eval.data, with as many tokens, or the run's own."""
        name = self.eval.data
        if name is None:
            return self.data
        files = {"name": "files", "source": "files", "files": name, "text_column": self.data.text_column}
        values = {key: value for key, value in shipped("data").get(name, files).items() if key != "defaults"}
        caps = {key: getattr(self.data, key) for key in ("max_train_tokens", "max_test_tokens")}
        return DataConfig(**caps | values)

    @property
    def phases(self) -> list[tuple[str, PhaseConfig]]:
        """Return the phases to run by name; without a router there is no router to train."""
        trained = self.attention.is_trainable
        return [(name, phase) for name, phase in self.recipe.phases.items() if phase.trainable != "router" or trained]


@dataclass
class ComposedConfig(Config):
    """Configuration as Hydra composes it, to which `checks.parse` adds the schema of attention.*."""

    attention: Any = MISSING


GROUPS = {key: schema for key, schema in get_type_hints(Config).items() if is_dataclass(schema)}


@cache
def list_keys() -> list[str]:
    """Return every dotted key, of attention.* those of the methods in ATTENTION."""
    keys = [f"budget.{name}" for name in shipped("budget")["base"]]
    schemas: list[tuple[str, Any]] = [("", Config), ("recipe.phases.<phase>.", PhaseConfig)]
    schemas += [("attention.", schema) for schema in ATTENTION.values()]
    for prefix, schema in schemas:  # which grows
        for name, hint in get_type_hints(schema).items():
            part = next(filter(is_dataclass, (hint, *get_args(hint))), None)
            if part and get_origin(hint) is not dict:
                schemas.append((f"{prefix}{name}.", part))
            else:
                keys.append(prefix + name)
    return list(dict.fromkeys(keys))  # methods share some


def register_schemas() -> None:
    """Register the schemas that the defaults lists of conf/ name, and the variants, each as a file of its own."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=ComposedConfig)
    # conf/recipe/router comes before the recipe, which leaves it as it is
    composed = GROUPS | {"recipe": RecipeConfig(fit=cast(Any, MISSING), router=cast(Any, MISSING))}
    for group, schema in composed.items():
        store.store(group=group, name=f"base_{group}", node=schema)
    for experiment, variants in shipped("variant").items():
        for name, overlay in variants.items():
            store.store(group=f"variant/{experiment}", name=name, node={"variant": name} | overlay, package="_global_")
