"""Schemas of what single jobs take, beside those that make up a run; config.py puts them together."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from focus_exp.attention.options import FitOptions, option

Numbers = list[int]
Names = list[str]


@dataclass
class BenchConfig:
    name: str = MISSING
    lengths: Numbers = option([], "tokens; empty: 1K to 64K on a CPU, to 1M on a GPU", least=1)
    prefill_lengths: Numbers = option([], least=1)
    step_lengths: Numbers = option([], least=1)
    decode_lengths: Numbers = option([], "tokens before the one that is timed", least=1)
    groups: Numbers = option([4, 8], "K of balanced groups", least=1)
    methods: Names = option([], "other attention, a layer of each timed at `lengths` too")
    top_k: Numbers = option([1], least=1)
    dtype: str = option(
        "bf16", "of the attention clocks; the model's own take trainer.precision", choices=("bf16", "float32")
    )
    repeats: int = option(7, "at most, fewer where one takes long, but always 3", least=1)
    routed_tokens: int = option(16_384, "held-out tokens whose groups a trained router is timed with", least=2)
    quality: bool = option(False, "perplexity at every k too")
    list: bool = option(False, "only say which kernels there are")


@dataclass
class GenerateConfig:
    name: str = MISSING
    prompts: int = option(4, "spread over the held-out text", least=1)
    prompt_tokens: int = option(384, least=1)
    new_tokens: int = option(128, least=1)
    top_k: Numbers = option([], "groups that a query reaches; empty: 1 to attention.groups")
    do_sample: bool = False
    temperature: float = option(1.0, above=0)
    top_p: float = option(1.0, least=0, most=1)


@dataclass
class ReportConfig:
    name: str = MISSING
    folder: str | None = option(None, "null: report, in runs_dir")
    check: bool = option(False, "only say which published tables no longer follow from their records")


@dataclass
class PlanConfig:
    name: str = MISSING
    gpu: str = option("h100", "a name of planning/hardware")
    gpus: int | None = option(None, "at most; null: as many as it takes", least=1)
    hours: float | None = option(None, "refuse what takes longer", above=0)
    utilization: float = option(0.4, "of the peak arithmetic of the GPU", least=0.01, most=1)
    models: list[str] = option([], "of conf/model, each planned in turn; empty: model alone")
    paper: bool = option(False, "each of `models` in the setting in which the paper trains it")
    experiments: list[str] = option([], "of conf/experiment, in place of this one: what training all their arms takes")
    folder: str | None = option(None, "where the table of `experiments` is written; null: nowhere")


@dataclass
class AnalyzeConfig:
    name: str = MISSING
    tokens: int = option(16_384, "held out, whose groups are described", least=2)
    passage_tokens: int = option(512, "shown on the page, coloured", least=2)
    pairs: int = option(20, "long-range ones listed of a layer", least=0)
    others: list[str] = option([], "adapters of other seeds, whose groups are compared with these")


@dataclass
class ReproduceConfig:
    name: str = MISSING
    tables: dict[str, list[str]] = option(
        {},
        "in the order in which they run: table -> overrides of the command that makes it; of these, "
        "`adapter=@name` takes the adapter that the table `name` left, or @name.arm that of an arm",
    )
    minutes: dict[str, float] = option({}, "about, at scale=embedded on 2 CPU cores")
    only: list[str] = option([], "of these tables; empty: all")
    publish: bool = option(False, "then copy their records to runs_dir/records, in place of those they supersede")


@dataclass
class ScaleConfig:
    """How much of everything a table takes: experiments refer to these."""

    name: str = MISSING
    tables: list[str] = option([], "of those that are reproduced; empty: all")
    steps: int = MISSING
    warmup_steps: int = MISSING
    long_steps: int = option(MISSING, "of a run that stands alone")
    alignment_steps: int = MISSING
    plain_steps: int = option(MISSING, "without a router: as many tokens as `steps` and its fitting and balancing read")
    both_steps: int = option(MISSING, "likewise, where a router has `steps` of its own before those of everything")
    small_steps: int = option(MISSING, "of many runs with small_model, their routers alone")
    small_more_steps: int = option(MISSING, "of them, everything")
    scratch_steps: int = MISSING
    warm_start_blocks: int = 12
    warm_start_steps: int = 100
    calibration_blocks: int = 8
    fit_blocks: int = FitOptions.fit_blocks
    fit_held_out: int = FitOptions.fit_held_out
    # not the methods' own default: what differs from that names a run, and the runs of fewer steps have names already
    fit_steps: int = 1200
    train_tokens: int | None = None
    test_tokens: int | None = None
    windows: int | None = None
    long_windows: int | None = None
    context_windows: int | None = option(None, "of 1,024 tokens, where contexts are long")
    context_tasks: list[str] = field(
        default_factory=lambda: ["perplexity@1024", "perplexity@2048", "perplexity@4096", "perplexity@8192"]
    )
    frontier_tasks: Names = field(default_factory=lambda: ["perplexity@4096", "perplexity@8192"])
    rates: list[float] = option([], "tried on validation text, as factors of an arm's learning rate")
    scratch_rates: list[float] = option([], "the same of models that are trained from scratch")
    limit: int | None = option(None, "documents of a task")
    suite_limit: int | None = option(None, "of one of the long-range suite")
    top_k: Numbers = option([], "that a router is measured with, where it stands alone; empty: all")
    analyze_tokens: int = 16_384
    lengths: Numbers = option([], "of the clocks; lengths empty: all that the device is for")
    method_lengths: Numbers = field(default_factory=Numbers)
    quality_lengths: Numbers = field(default_factory=lambda: [2048, 8192])
    model_lengths: Numbers = field(default_factory=Numbers)
    step_lengths: Numbers = field(default_factory=Numbers)
    decode_lengths: Numbers = field(default_factory=Numbers)
    prompts: int = MISSING
    small_model: list[str] = option(
        [], "settings of every arm: for tables of many long runs, and for twins from scratch"
    )
    small_windows: Numbers = option([], "a sixteenth, a quarter and a half of its text")
    scratch: list[str] = field(default_factory=list)
    models: dict[str, list[str]] = option({}, "arms: name -> settings")
    domains: dict[str, list[str]] = field(default_factory=dict)
