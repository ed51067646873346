"""Schemas under every YAML file of conf/, whose comments explain the keys; and the former names of keys.

OmegaConf refuses unknown keys and wrong types while it composes; checks.py refuses values that do not go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from pydantic import Field

from focus_exp.attention.options import (
    Checked,
    Count,
    FocusDualOptions,
    FocusOptions,
    Fraction,
    NonNegative,
    Options,
    Positive,
    Seed,
    Size,
    choices,
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
    window: Size = 128
    backend: Annotated[str, choices(*BACKENDS)] = "auto"


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
class ModelConfig(Checked):
    name: str = MISSING
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    base_run: list[str] = field(default_factory=list)
    quantization: Annotated[str, choices("none", "int8", "nf4")] = "none"


@dataclass
class PhaseConfig(Checked):
    trainable: Annotated[str, choices("router", "lora", "all")] = "router"
    objective: Annotated[str, choices("lm", "distill")] = "lm"
    steps: Size = MISSING
    learning_rate: Positive = MISSING
    weight_decay: NonNegative = 0.0
    warmup_steps: Size = 5


@dataclass
class LoraConfig(Checked):
    rank: Count | None = 4
    router_groups: Count = FocusOptions.groups
    alpha: Count | None = None
    target_modules: list[str] = field(default_factory=list)


@dataclass
class TuneConfig(Checked):
    factors: list[Positive] = field(default_factory=list)
    sequences: Count = 16
    seed: Seed = 0


@dataclass
class FitConfig(Checked):
    sequences: Size = 64
    validation_sequences: Count = 16
    steps: Annotated[int, Field(ge=4)] = 600
    learning_rate: Positive = 0.005
    importance: Annotated[str, choices("loss", "attention")] = "loss"
    ignored_means: Size = 0
    summed_queries: Count = 1


@dataclass
class RouterConfig(Checked):
    warm_start_sequences: Size = 0
    warm_start_steps: Count = 100
    balance_sequences: Size = 0
    gate_steepness_start: NonNegative | None = None
    centroid_decay: Fraction = 0.999
    recluster_every: Count = 100


@dataclass
class RecipeConfig(Checked):
    name: str = MISSING
    from_scratch: bool = False
    steps: Size | None = None
    warmup_steps: Size = 5
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    tune: TuneConfig = field(default_factory=TuneConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fit: FitConfig | None = None  # of a method that is not fitted
    router: RouterConfig | None = None  # of a method without a router

    def trains(self, part: str) -> bool:
        """Return whether any phase trains `part`: router, lora or all."""
        return any(phase.trainable == part for phase in self.phases.values())


@dataclass
class DataConfig(Checked):
    name: str = MISSING
    source: Annotated[str, choices("hub", "files", "books", "addresses", "mixture")] = MISSING
    hub_id: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    text_column: str = "text"
    files: str | None = None
    parts: list[str] = field(default_factory=list)
    seq_len: Annotated[int, Field(ge=2)] = 1024
    max_train_tokens: Count | None = None
    max_test_tokens: Count | None = None
    hidden_facts: bool = False


def data_set(name: str, **values: Any) -> DataConfig:
    """Return data.* of a file of conf/data, whose own keys take precedence over `values`."""
    return DataConfig(**values | {key: value for key, value in shipped("data")[name].items() if key != "defaults"})


@dataclass
class EvalConfig(Checked):
    name: str = MISSING
    data: str | None = None
    split: Annotated[str, choices("validation", "test")] = "test"
    seq_len: Annotated[int, Field(ge=2)] = 1024
    max_sequences: Count | None = None
    batch_size: Count = 1
    controls: bool = True
    bounds: bool = True
    top_k: list[Count] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    limit: Count | None = None
    long_range_limit: Count | None = None
    num_fewshot: Size | None = None
    request_batch_size: Count = 8
    long_range_distance: Count | None = None


@dataclass
class TrainerConfig(Checked):
    name: str = MISSING
    accelerator: Annotated[str, choices("auto", "cpu", "gpu")] = "auto"
    precision: Annotated[str, choices("auto", "bf16", "float32")] = "auto"
    batch_size: Count = 1
    accumulate: Count = 1
    gradient_clip: Positive = 1.0
    gradient_checkpointing: bool = False
    checkpoint_every: Count = 25
    checkpoint_minutes: NonNegative | None = None
    log_every: Count = 1
    probe_every: Size | None = None
    progress: bool = True
    strategy: Annotated[str, choices("auto", "single", "ddp", "fsdp")] = "auto"
    devices: Count = 1
    num_nodes: Count = 1


@dataclass
class LoggerConfig(Checked):
    name: str = MISSING
    wandb: Annotated[str, choices("auto", "online", "offline", "disabled")] = "auto"
    wandb_project: str = "focus_exp"
    wandb_entity: str | None = None


@dataclass
class BenchConfig(Checked):
    name: str = MISSING
    lengths: list[Count] = field(default_factory=list)
    prefill_lengths: list[Count] = field(default_factory=list)
    step_lengths: list[Count] = field(default_factory=list)
    decode_lengths: list[Count] = field(default_factory=list)
    groups: list[Count] = field(default_factory=lambda: [4, 8])
    methods: list[str] = field(default_factory=list)
    top_k: list[Count] = field(default_factory=lambda: [1])
    compile: list[Annotated[str, choices("default", "reduce-overhead", "max-autotune")]] = field(default_factory=list)
    graphs: bool = False
    dtype: Annotated[str, choices("bf16", "float32")] = "bf16"
    repeats: Count = 7
    routed_tokens: Annotated[int, Field(ge=2)] = 16_384
    quality: bool = False


@dataclass
class GenerateConfig(Checked):
    name: str = MISSING
    prompts: Count = 4
    prompt_tokens: Count = 384
    new_tokens: Count = 128
    top_k: list[int] = field(default_factory=list)


@dataclass
class ReportConfig(Checked):
    name: str = MISSING
    collect: str | None = None


@dataclass
class PlanConfig(Checked):
    name: str = MISSING
    gpu: Annotated[str, choices(*GPUS)] = "h100"
    gpus: Count | None = None
    utilization: Annotated[float, Field(ge=0.01, le=1)] = 0.4


@dataclass
class AnalyzeConfig(Checked):
    name: str = MISSING
    tokens: Annotated[int, Field(ge=2)] = 16_384
    passage_tokens: Annotated[int, Field(ge=2)] = 512
    pairs: Size = 20
    others: list[str] = field(default_factory=list)


@dataclass
class ReproduceConfig(Checked):
    name: str = MISSING
    tables: dict[str, list[str]] = field(default_factory=dict)
    assets: Annotated[str, choices("auto", "hub", "embedded")] | None = None
    only: list[str] = field(default_factory=list)


@dataclass
class Config(Checked):
    job: Annotated[str, choices(*JOBS)] = "train"
    experiment: str = "adhoc"
    assets: Annotated[str, choices("auto", "hub", "embedded")] = "auto"
    seed: Seed = 0
    overwrite: bool = False
    runs_dir: str = "runs"
    cache_dir: str | None = None
    adapter: str | None = None
    check_base: bool = True
    variant: str | None = None
    variants: list[str] = field(default_factory=list)
    shared_variant: str | None = None
    references: list[str] = field(default_factory=list)
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
    budget: dict[str, Any] = field(default_factory=dict)
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
        name, data = self.eval.data, self.data
        if name is None:
            return data
        caps = {key: getattr(data, key) for key in ("max_train_tokens", "max_test_tokens")}
        if name in shipped("data"):
            return data_set(name, **caps)
        return DataConfig(name="files", source="files", files=name, text_column=data.text_column, **caps)

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


def register_schemas(*, names_only: bool = False) -> None:
    """Register the schemas that the defaults lists of conf/ name, and the variants, each as a file of its own.

    Args:
        names_only: leave variants empty: --help copies all of them for each group that it lists.
    """
    store = ConfigStore.instance()
    store.store(name="base_config", node=ComposedConfig)
    # conf/recipe/router comes before the recipe, which leaves it as it is
    composed = GROUPS | {"recipe": RecipeConfig(fit=cast(Any, MISSING), router=cast(Any, MISSING))}
    for group, schema in composed.items():
        store.store(group=group, name=f"base_{group}", node=schema)
    for experiment, variants in shipped("variant").items():
        for name, overlay in variants.items():
            node = {} if names_only else {"variant": name} | overlay
            store.store(group=f"variant/{experiment}", name=name, node=node, package="_global_")
