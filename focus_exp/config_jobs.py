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
    lengths: Numbers = option([], least=1)
    prefill_lengths: Numbers = option([], least=1)
    step_lengths: Numbers = option([], least=1)
    decode_lengths: Numbers = option([], least=1)
    groups: Numbers = option([4, 8], least=1)
    methods: Names = option([])
    top_k: Numbers = option([1], least=1)
    dtype: str = option("bf16", choices=("bf16", "float32"))
    repeats: int = option(7, least=1)
    routed_tokens: int = option(16_384, least=2)
    quality: bool = option(False)
    list: bool = option(False)


@dataclass
class GenerateConfig:
    name: str = MISSING
    prompts: int = option(4, least=1)
    prompt_tokens: int = option(384, least=1)
    new_tokens: int = option(128, least=1)
    top_k: Numbers = option([])
    do_sample: bool = False
    temperature: float = option(1.0, above=0)
    top_p: float = option(1.0, least=0, most=1)


@dataclass
class ReportConfig:
    name: str = MISSING
    folder: str | None = option(None)
    check: bool = option(False)


@dataclass
class PlanConfig:
    name: str = MISSING
    gpu: str = option("h100")
    gpus: int | None = option(None, least=1)
    hours: float | None = option(None, above=0)
    utilization: float = option(0.4, least=0.01, most=1)
    models: list[str] = option([])
    paper: bool = option(False)
    experiments: list[str] = option([])
    folder: str | None = option(None)


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
    minutes: dict[str, float] = option({})
    only: list[str] = option([])
    publish: bool = option(False)


@dataclass
class BudgetConfig:
    """How much of everything a table takes: experiments refer to these."""

    name: str = MISSING
    tables: list[str] = option([])
    steps: int = MISSING
    warmup_steps: int = MISSING
    long_steps: int = option(MISSING)
    alignment_steps: int = MISSING
    plain_steps: int = option(MISSING)
    both_steps: int = option(MISSING)
    small_steps: int = option(MISSING)
    small_more_steps: int = option(MISSING)
    scratch_steps: int = MISSING
    warm_start_sequences: int = 12
    warm_start_steps: int = 100
    balance_sequences: int = 8
    calibration_sequences: int = FitOptions.calibration_sequences
    validation_sequences: int = FitOptions.validation_sequences
    # not the methods' own default: what differs from that names a run, and the runs of fewer steps have names already
    fit_steps: int = 1200
    train_tokens: int | None = None
    test_tokens: int | None = None
    eval_sequences: int | None = None
    long_eval_sequences: int | None = None
    context_sequences: int | None = option(None)
    context_tasks: list[str] = field(
        default_factory=lambda: ["perplexity@1024", "perplexity@2048", "perplexity@4096", "perplexity@8192"]
    )
    frontier_tasks: Names = field(default_factory=lambda: ["perplexity@4096", "perplexity@8192"])
    lr_factors: list[float] = option([])
    scratch_lr_factors: list[float] = option([])
    limit: int | None = option(None)
    long_range_limit: int | None = option(None)
    top_k: Numbers = option([])
    analyze_tokens: int = 16_384
    lengths: Numbers = option([])
    method_lengths: Numbers = field(default_factory=Numbers)
    quality_lengths: Numbers = field(default_factory=lambda: [2048, 8192])
    model_lengths: Numbers = field(default_factory=Numbers)
    step_lengths: Numbers = field(default_factory=Numbers)
    decode_lengths: Numbers = field(default_factory=Numbers)
    prompts: int = MISSING
    small_variant: str | None = None
    small_windows: Numbers = option([])
    scratch_variant: str | None = None
    model_variants: Names = option([])
    domain_variants: Names = option([])
