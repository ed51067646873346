"""Former keys of the configuration: read in older records and adapters, answered on the command line."""

from __future__ import annotations

import copy
import re
from dataclasses import fields
from typing import Any

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
    "logger.csv": None,
    "generate.do_sample": None,
    "generate.temperature": None,
    "generate.top_p": None,
    "plan.experiments": None,
    "plan.folder": None,
    "plan.hours": None,
    "plan.paper": None,
    "report.folder": None,
    "bench.list": None,
    "trainer.keep_checkpoints": None,
    "trainer.cpu_offload": None,
    "reproduce.minutes": None,
    "reproduce.publish": None,
    "model.trained_by": "model.base_run",
    "data.split_special_tokens": None,
    "data.workers": None,
    "data.block_size": "data.seq_len",
    "eval.window": "eval.seq_len",
    "eval.max_windows": "eval.max_sequences",
    "eval.stride": None,
    "eval.bootstrap_samples": None,
    "eval.pair_rules": None,
    "eval.allow_truncation": None,
    "eval.suite_limit": "eval.long_range_limit",
    "eval.suite_window": "eval.long_range_distance",
    "recipe.tune.windows": "recipe.tune.sequences",
    "recipe.lora.dora": None,
    "recipe.phases.*.aim": "recipe.phases.*.objective",
    "recipe.phases.*.train": "recipe.phases.*.trainable",
    "attention.warm_start_blocks": "attention.warm_start_sequences",
    "attention.calibration_blocks": "attention.balance_sequences",
    "attention.fit_blocks": "attention.calibration_sequences",
    "attention.fit_held_out": "attention.validation_sequences",
    "attention.pairs": "attention.density",
    "attention.share": "attention.density",
    "attention.budget": "attention.groups_per_layer",
    "attention.rank": None,
    "attention.min_groups": None,
}
RENAMED_VALUES = {"objective": {"text": "lm", "base": "distill"}}


# former keys of other syntax -> what to type
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
    external = "." in (values.get("attention") or {}).get("method", "")  # a class outside of focus_exp
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
