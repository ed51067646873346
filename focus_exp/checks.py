"""Checks that need more than a type: refuse what is well-typed but impossible, naming key, value and fix."""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

from omegaconf import DictConfig, OmegaConf

from focus_exp.attention import options
from focus_exp.config import Config
from focus_exp.errors import UserError

# each a module of that name in jobs/, with a function of that name
JOBS = (
    *("train", "evaluate", "bench", "generate", "compare", "analyze"),
    *("plan", "report", "dashboard", "reproduce", "sweep_status", "build_tasks"),
)
CHOICES = {
    "job": JOBS,
    "assets": ("auto", "hub", "embedded"),
    "attention.method": (
        *("full", "focus", "window", "random_groups"),
        *("longformer", "performer", "routing_transformer", "sparq", "magicpig"),
    ),
    "attention.assignment": ("balanced", "sinkhorn", "softmax"),
    "attention.gate": ("log", "multiplicative"),
    "attention.pair_rule": ("query_topk", "share"),
    "attention.centroid_update": ("gradient", "ema", "recluster"),
    "model.quantization": ("none", "int8", "nf4"),
    "attention.train_with": ("soft", "hard"),
    "attention.backend": (
        *("auto", "masked", "triton", "flash-attn", "torch-flash", "torch-fa3", "torch-fa4", "cpu-flash", "math"),
    ),
    "data.source": ("hub", "files", "books"),
    "bench.dtype": ("bf16", "float32"),
    "eval.split": ("validation", "test"),
    "trainer.accelerator": ("auto", "cpu", "gpu"),
    "trainer.precision": ("auto", "bf16", "float32"),
    "trainer.strategy": ("auto", "single", "ddp", "fsdp"),
    "logger.wandb": ("auto", "online", "offline", "disabled"),
}
AT_LEAST = {f"attention.{name}": low for name, low in options.AT_LEAST.items()} | {
    "seed": 0,
    "regime.steps": 1,
    "regime.warmup_steps": 0,
    "attention.gate_steepness_start": 0,
    "attention.warm_start_blocks": 0,
    "attention.warm_start_steps": 1,
    "attention.calibration_blocks": 0,
    "attention.recluster_every": 1,
    "data.block_size": 2,
    "data.max_train_tokens": 1,
    "data.max_test_tokens": 1,
    "data.workers": 0,
    "eval.window": 2,
    "eval.stride": 1,
    "eval.max_windows": 1,
    "eval.batch_size": 1,
    "eval.bootstrap_samples": 1,
    "eval.limit": 1,
    "eval.num_fewshot": 0,
    "eval.request_batch_size": 1,
    "eval.suite_window": 1,
    "bench.repeats": 1,
    "generate.prompts": 1,
    "generate.prompt_tokens": 1,
    "generate.new_tokens": 1,
    "bench.routed_tokens": 2,
    "trainer.batch_size": 1,
    "trainer.accumulate": 1,
    "trainer.checkpoint_every": 1,
    "trainer.log_every": 1,
    "trainer.probe_every": 0,
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "plan.gpus": 1,
    "analyze.tokens": 2,
    "analyze.passage_tokens": 2,
    "analyze.pairs": 0,
}
ABOVE_ZERO = (
    *(f"attention.{name}" for name in options.ABOVE_ZERO),
    *("trainer.gradient_clip", "generate.temperature", "plan.utilization"),
)
FROM_ONE = (  # every number of a list
    *("bench.lengths", "bench.prefill_lengths", "bench.step_lengths", "bench.decode_lengths", "bench.groups"),
    *("bench.top_k", "eval.top_k"),
)
SHARES = (*(f"attention.{name}" for name in options.SHARES), "generate.top_p")


def parse(composed: DictConfig) -> Config:
    """The composed configuration as dataclasses, checked; UserError names key, value and fix."""
    refuse_unknown_keys(composed)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise UserError(f"{missing[0]} has no value; give it as {missing[0]}=...")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    validate(config)
    return config


def refuse_unknown_keys(composed: DictConfig, prefix: str = "") -> None:
    """UserError for a key that no schema has: OmegaConf lets +key=value add some, which nothing would read."""
    schema = OmegaConf.get_type(composed)
    names = [f.name for f in fields(schema)] if is_dataclass(schema) else None
    for key in map(str, composed):
        if names is not None and key not in names:
            raise UserError(f"there is no key {prefix}{key}{did_you_mean(key, names)}")
        if not OmegaConf.is_missing(composed, key) and isinstance(composed[key], DictConfig):
            refuse_unknown_keys(composed[key], f"{prefix}{key}.")


def did_you_mean(name: str, options: list[str]) -> str:
    close = difflib.get_close_matches(name.split(".")[-1], options, n=3, cutoff=0.5)
    return f"\n  did you mean {' or '.join(close)}?" if close else ""


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
    validate_tasks(config.eval.tasks)
    if config.job == "compare" and not config.arms:
        raise UserError("job=compare needs arms: a name and its settings each, as +experiment=compare has them")
    if config.job == "compare" and config.arm is not None and config.arm not in config.arms:
        raise UserError(f"arm={config.arm} is not one of {', '.join(config.arms)}")
    if config.adapter and config.job == "train":
        raise UserError(f"adapter={config.adapter} is for job=evaluate; add job=evaluate, or leave adapter out")
    validate_attention(config)
    validate_regime(config)
    for k in config.generate.top_k or []:
        if not 1 <= k <= config.attention.groups:
            raise UserError(f"generate.top_k holds {k}; use 1 to attention.groups={config.attention.groups}")
    for key in FROM_ONE:
        values = lookup(config, key)
        if values is not None and (not all(value >= 1 for value in values)):
            raise UserError(f"{key}={values} is impossible; use numbers from 1")
    if config.data.source == "files" and not config.data.files:
        raise UserError("data=files needs data.files=<folder or glob of text files>")
    if config.data.source == "hub" and not config.data.hub_id:
        raise UserError("data.source=hub needs data.hub_id")
    if not (config.model.path or config.model.hub_id or config.model.architecture or config.model.trained_by):
        raise UserError(f"model {config.model.name} has neither path, nor hub_id, nor architecture")


def validate_tasks(tasks: list[str]) -> None:
    for task in tasks:
        kind, at, length = task.partition("@")
        if (at or kind == "perplexity") and (not length.isdecimal() or int(length) < 2):
            raise UserError(f"eval.tasks holds {task}; give its length as a whole number, such as {kind}@1024")
        if tasks.count(task) > 1:
            raise UserError(f"eval.tasks holds {task} more than once; leave it out once")


def validate_attention(config: Config) -> None:
    attention, groups = config.attention, config.attention.groups
    if attention.top_k > groups:
        raise UserError(f"attention.top_k={attention.top_k} exceeds attention.groups={groups}; use 1 to {groups}")
    if attention.method == "sparq" and attention.recent_tokens > attention.tokens_kept:
        raise UserError(
            f"attention.recent_tokens={attention.recent_tokens} exceeds attention.tokens_kept={attention.tokens_kept}, "
            f"which counts them; use 1 to {attention.tokens_kept}"
        )
    if attention.hash_bits > 15:
        raise UserError(f"attention.hash_bits={attention.hash_bits} is impossible; use 1 to 15")
    if attention.gate == "multiplicative" and attention.gate_threshold != 0:
        raise UserError(
            f"attention.gate_threshold={attention.gate_threshold} goes with attention.gate=log alone; "
            "set it to 0, or use attention.gate=log"
        )


def validate_regime(config: Config) -> None:
    regime = config.regime
    for name, phase in regime.phases.items():
        where = f"regime.phases.{name}"
        if phase.train not in ("router", "lora", "all"):
            raise UserError(f"{where}.train={phase.train} is not one of router, lora, all")
        if not 0 < phase.learning_rate < inf:
            raise UserError(f"{where}.learning_rate={phase.learning_rate} is impossible; use a number above 0")
        for key, low in (("steps", 1), ("warmup_steps", 0), ("weight_decay", 0)):
            if getattr(phase, key) < low:
                raise UserError(f"{where}.{key}={getattr(phase, key)} is impossible; use {low} or more")
    for key, value in (("rank", regime.lora.rank), ("alpha", regime.lora.alpha)):
        if value is not None and value < 1:
            raise UserError(f"regime.lora.{key}={value} is impossible; use 1 or more, or null to have it chosen")
    if regime.trains("lora") and config.attention.method == "focus":
        raise UserError(
            f"regime={regime.name} trains LoRA in place of a router, but attention={config.attention.name} has one; "
            "use attention=full, or regime=retrofit"
        )
    if regime.trains("lora") and regime.trains("all"):
        raise UserError(f"regime={regime.name} trains both LoRA and the weights under it; leave one of them out")
    trains_router_only = bool(regime.phases) and all(phase.train == "router" for phase in regime.phases.values())
    if trains_router_only and config.attention.method != "focus":
        raise UserError(
            f"regime={regime.name} trains only a router, but attention={config.attention.name} has none; "
            "use attention=focus, or regime=none to measure it as it is, or regime=finetune"
        )
    if regime.from_scratch and not regime.trains("all"):
        raise UserError(f"regime={regime.name} starts from random weights but no phase trains them; add train: all")
