"""Turn a composed configuration into dataclasses, and refuse what is well-typed but impossible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from focus_exp.assets import find_adapter
from focus_exp.attention.options import FocusDualOptions, did_you_mean, validate_options
from focus_exp.config import (
    ATTENTION,
    GROUPS,
    ComposedConfig,
    Config,
    DataConfig,
    FitConfig,
    ModelConfig,
    build_attention,
    is_fitted,
    list_keys,
    shipped,
)
from focus_exp.errors import UserError, not_installed
from focus_exp.launcher import is_requeued

SYNONYMS = {"max_steps": "steps", "lr": "learning_rate"}  # names of keys elsewhere
FLASH_METHODS = ("focus", "random_groups")  # whose routing backend=flash serves
PERPLEXITY = "perplexity"  # perplexity@<tokens>: the task that is not lm-eval's
PLACES = ("path", "hub_id")
# fields that a YAML file sets for its own weights or text alone
FILE_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"revision": None, "architecture": {}, "base_run": []},
    "data": {"revision": None, "subset": None},
}
Part = TypeVar("Part", ModelConfig, DataConfig)


def parse(composed: DictConfig) -> Config:
    """Return the composed configuration as validated dataclasses.

    Raises:
        UserError, OmegaConfBaseException: naming key, value and what to type instead.
    """
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise UserError(f"{missing[0]} must have a value. Type {missing[0]}=...")
    # refuses keys that no schema has: +key=value may have added some
    schema = OmegaConf.structured(ComposedConfig)
    composed = cast(DictConfig, OmegaConf.merge(schema, OmegaConf.to_container(composed)))
    if unknown := sorted(set(map(str, composed.budget)) - set(shipped("budget")["base"])):
        raise UserError(unknown_key_reason(f"budget.{unknown[0]}"))
    name, method = composed.attention.name, composed.attention.method
    if shipped("attention").get(name, {"method": method})["method"] != method:
        raise UserError(
            f"attention.method must be that of attention={name} (got {method}). Choose a method with attention=<name>."
        )
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.attention = build_attention(cast(Any, OmegaConf.to_container(composed.attention, resolve=True)))
    if not is_fitted(method):
        config.recipe.fit = None
    if not config.attention.is_soft:
        config.recipe.router = None
    config.overwrite = config.overwrite and not is_requeued()  # a requeued job resumes
    if "@" in (config.model.hub_id or ""):
        config.model.hub_id, _, config.model.revision = str(config.model.hub_id).partition("@")
    config.model, config.data = drop_file_fields("model", config.model), drop_file_fields("data", config.data)
    validate(config)
    if config.adapter:  # a folder from here on: its content is part of the run's name
        config.adapter = str(find_adapter(config.adapter))
    config.eval.adapters = [str(find_adapter(adapter)) for adapter in config.eval.adapters]
    return config


def drop_file_fields(group: str, part: Part) -> Part:
    """Drop what the YAML file of `part` sets for its own weights or text, if `part` names another place.

    The name of the file is replaced by the last part of that place: a user's model is not called gpt2_124m.
    """
    files = shipped(group).values()
    place = [getattr(part, key, None) for key in PLACES]
    if place in ([values.get(key) for key in PLACES] for values in files):
        return part
    foreign = {
        key: empty
        for key, empty in FILE_FIELDS[group].items()
        if any(values.get(key) and values[key] == getattr(part, key) for values in files)
    }
    last = next((Path(name).name for name in place if name), part.name)
    return replace(part, **foreign, name=last if part.name in shipped(group) else part.name)


def unknown_key_reason(key: str) -> str:
    """Return what to type instead of a dotted key that does not exist."""
    group, _, name = key.rpartition(".")
    name = SYNONYMS.get(name, name)
    keys = [*GROUPS, *(known for known in list_keys() if group == "budget" or not known.startswith("budget."))]
    same = [known for known in keys if known.rpartition(".")[2] == name]
    if key in same:
        methods = [method for method, schema in ATTENTION.items() if name in (item.name for item in fields(schema))]
        return f"{key} is not an option of this method; it is one of attention={' and attention='.join(methods)}"
    if same:
        return f"{key} is not a key; did you mean {' or '.join(same)}?"
    group = re.sub(r"(recipe\.phases\.)\w+", r"\1<phase>", group)
    siblings = [known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == group]
    return f"{key} is not a key{did_you_mean(name, siblings) if siblings else ''}"


def refuse_unused(config: Config, overrides: list[str]) -> None:
    """Raise UserError for a typed key of recipe.fit or recipe.router that the method ignores.

    Those of a comparison are for the variants that have them.
    """
    if config.adapter or config.job in ("compare", "reproduce"):
        return
    for override in overrides:
        key, _, value = override.partition("=")
        part = next((part for part in ("fit", "router") if key.startswith((f"recipe.{part}.", f"recipe/{part}"))), None)
        if part and getattr(config.recipe, part) is None:
            reason = f"attention={config.attention.name}, which {'is not fitted' if part == 'fit' else 'has no router'}"
            raise UserError(f"{key} must be left out with {reason} (got {value}).")


def validate(config: Config) -> None:
    """Raise UserError for the first value that is out of its limits or does not go with another."""
    try:
        validate_options(config)
        validate_options(config.attention, "attention.")
    except ValueError as error:
        raise UserError(str(error)) from None
    for check in CHECKS:
        if reason := next(check(config), None):
            raise UserError(reason)


def check_job(config: Config) -> Iterator[str]:
    job, seq_len = config.job, config.eval.seq_len
    if job == "compare" and not config.variants:
        yield "variants must not be empty with job=compare. Type +experiment=compare or variants=[...]."
    if config.adapter and job == "train":
        yield f"adapter must be empty with job=train (got {config.adapter}). Type job=evaluate to measure it."
    if job == "analyze" and config.analyze.passage_tokens > seq_len:
        yield f"analyze.passage_tokens must be <= eval.seq_len={seq_len} (got {config.analyze.passage_tokens})."
    if job == "generate" and config.generate.prompt_tokens >= seq_len:
        yield f"generate.prompt_tokens must be < eval.seq_len={seq_len} (got {config.generate.prompt_tokens})."


def check_places(config: Config) -> Iterator[str]:
    model, data = config.model, config.data
    hub_id = model.hub_id or ""
    is_deep = hub_id.partition(":")[0].count("/") > 1
    if hub_id.startswith((".", "/", "~")) or is_deep or (hub_id and Path(hub_id).exists()):
        yield f"model.hub_id must be owner/name of a Hub repository (got {hub_id}). Type model.path={hub_id}."
    if not (model.path or model.hub_id or model.architecture or model.base_run):
        yield f"model={model.name} must have a path, hub_id or architecture. Type model.path=... or model.hub_id=..."
    if data.files and data.source != "files":
        yield f"data.files must be empty with data={data.name} (got {data.files}). Type data=files."
    if data.source == "files" and not data.files:
        yield "data.files must be set with data=files. Type data.files=<folder or glob of text files>."
    if data.parts and data.source != "mixture":
        yield f"data.parts must be empty with data={data.name} (got {data.parts}). Type data=mixture."
    data_sets = {name for name, values in shipped("data").items() if "???" not in values.values()} - {"mixture"}
    scored = config.eval.data
    if scored and scored not in data_sets | {"mixture"} and not (Path(scored).exists() or set(scored) & set("*?[:")):
        choices = ", ".join(sorted({*data_sets, "mixture"}))
        yield f"eval.data must be one of {choices}, or files as in data.files (got {scored})."
    if data.source == "mixture" and not (data.parts and set(data.parts) <= data_sets):
        yield f"data.parts must be of {', '.join(sorted(data_sets))} (got {data.parts}). Type data.parts=[books,code]."
    if data.source == "hub" and not data.hub_id:
        yield f"data.hub_id must be set with data={data.name}. Type data.hub_id=<owner/name>."
    weights = model.path or model.hub_id
    if not weights or config.recipe.from_scratch:
        return
    known = [{}, *(values.get("architecture", {}) for values in shipped("model").values())]
    changed = [{key for key, value in model.architecture.items() if value != other.get(key)} for other in known]
    if changes := sorted(key for key in min(changed, key=len) if "drop" not in key):  # dropout has no weights
        yield (
            f"model.architecture.{changes[0]} must be that of {weights} (got {model.architecture[changes[0]]}). "
            "Leave it out, or use random weights with model.hub_id=null model.path=null."
        )


def check_tasks(config: Config) -> Iterator[str]:
    tasks = config.eval.tasks
    for task in tasks:
        kind, at, length = task.partition("@")
        if (at or kind == PERPLEXITY) and (not length.isdecimal() or int(length) < 2):
            yield f"eval.tasks must give lengths as integers (got {task}). Type {kind}@1024."
        if tasks.count(task) > 1:
            yield f"eval.tasks must not repeat a task (got {task} twice)."
    is_measured = config.job in ("train", "evaluate", "compare")
    # before the hours of training, not after
    if is_measured and any(not t.startswith(f"{PERPLEXITY}@") for t in tasks) and find_spec("lm_eval") is None:
        yield f"eval.tasks: {not_installed('lm_eval')}"


def check_attention(config: Config) -> Iterator[str]:
    attention: Any = config.attention
    if config.eval.adapters and attention.method == "full":
        yield (
            f"eval.adapters must be empty with attention={attention.name} (got {config.eval.adapters}): they are "
            "measured in place of a method. Measure one with job=evaluate adapter=..."
        )
    if attention.needs_fit() and not config.fitting:
        yield f"attention.density must be null with recipe.fit.sequences=0 (got {attention.density})."


def check_fit(config: Config) -> Iterator[str]:
    fit, default = config.recipe.fit, FitConfig()
    if fit is None:
        return
    if 0 < fit.sequences <= fit.validation_sequences:
        least = f"recipe.fit.validation_sequences={fit.validation_sequences}"
        yield f"recipe.fit.sequences must be > {least} (got {fit.sequences})."
    for key in sorted({*FocusDualOptions.fit_settings} - {*config.attention.fit_settings}):
        if (value := getattr(fit, key)) != (unused := getattr(default, key)):
            yield (
                f"recipe.fit.{key} must be {unused} with attention={config.attention.name} (got {value}). Leave it "
                "out, or type attention=focus_dual."
            )


def check_flash(config: Config) -> Iterator[str]:
    attention = config.attention
    if attention.backend != "flash":
        return
    if attention.method not in FLASH_METHODS:
        yield (
            f"attention.backend must be auto, masked, triton or cpu with attention={attention.name} (got flash, which "
            f"serves attention.method {' and '.join(FLASH_METHODS)})."
        )
    elif getattr(attention, "pair_rule", "") == "share" and getattr(attention, "top_k", 1) > 1:
        yield "attention.pair_rule must be query_topk with attention.backend=flash and top_k > 1 (got share)."
    elif getattr(attention, "train_with", "soft") == "hard":
        yield "attention.train_with must be soft with attention.backend=flash (got hard)."


def check_top_k(config: Config) -> Iterator[str]:
    attention, top_k = config.attention, config.generate.top_k
    groups = getattr(attention, "groups", 0) if attention.is_trainable else 0
    if top_k and groups and not attention.routing:
        yield f"generate.top_k must be empty with attention.density or attention.groups_per_layer (got {top_k})."
    if attention.is_soft and config.eval.top_k and not any(1 <= k <= groups for k in config.eval.top_k):
        yield f"eval.top_k must be from 1 to attention.groups={groups} (got {config.eval.top_k})."
    if groups and not all(1 <= k <= groups for k in top_k):
        yield f"generate.top_k must be from 1 to attention.groups={groups} (got {top_k})."


def check_recipe(config: Config) -> Iterator[str]:
    recipe, tune, attention = config.recipe, config.recipe.tune, config.attention.name
    trains_router = bool(recipe.phases) and all(phase.trainable == "router" for phase in recipe.phases.values())
    if recipe.trains("lora") and config.attention.is_soft:
        yield f"recipe={recipe.name} must go with attention=full (got {attention}). Or type recipe=retrofit."
    if recipe.trains("lora") and config.eval.adapters:
        yield (
            f"eval.adapters must be empty with recipe={recipe.name} (got {config.eval.adapters}): routers belong to "
            "the frozen base. Type 'eval.adapters=[]'."
        )
    if recipe.trains("lora") and recipe.trains("all"):
        yield f"recipe={recipe.name} must not train both LoRA and the base weights. Leave one of them out."
    if trains_router and not config.attention.is_trainable:
        yield (
            f"recipe={recipe.name} must go with a method that has a router (got attention={attention}). Type "
            "attention=focus, recipe=none to measure without training, or recipe=finetune."
        )
    for name, phase in recipe.phases.items():
        if phase.objective == "distill" and phase.trainable != "router":
            yield (
                f"recipe.phases.{name}.objective must be lm with trainable: {phase.trainable} (got distill). Type "
                "objective=lm."
            )
    if tune.factors and config.eval.split == "validation":
        yield (
            "eval.split must be test with recipe.tune.factors, which are chosen on validation text (got validation). "
            "Or type recipe.tune.factors=[]."
        )
    if tune.factors and config.job in ("analyze", "bench", "generate") and not config.adapter:
        yield (
            f"recipe.tune.factors must be empty with job={config.job} (got {tune.factors}). Train first, then type "
            "adapter=<run folder>/adapter."
        )
    if recipe.from_scratch and not recipe.trains("all"):
        yield f"recipe={recipe.name} must train all weights with from_scratch. Add a phase with trainable: all."


def check_processes(config: Config) -> Iterator[str]:
    trainer, quantization = config.trainer, config.model.quantization
    count, is_sharded = trainer.devices * trainer.num_nodes, trainer.strategy == "fsdp"
    if config.job != "train":
        return
    if trainer.strategy == "single" and count > 1:
        yield f"trainer.devices must be 1 with trainer.strategy=single (got {count} processes). Use ddp or fsdp."
    if config.phases and trainer.accumulate % count:
        yield (
            f"trainer.accumulate must be a multiple of {count}, the processes (got {trainer.accumulate}). Type "
            f"trainer.accumulate={-(-trainer.accumulate // count) * count}, with a smaller trainer.batch_size for as "
            "many sequences a step."
        )
    if is_sharded and config.fitting:
        yield (
            f"recipe.fit.sequences must be 0 with trainer.strategy=fsdp: {config.attention.name} is fitted "
            "to a whole model. Use trainer.strategy=ddp, or a fitted adapter."
        )
    if quantization != "none" and config.recipe.trains("all"):
        yield (
            f"model.quantization={quantization} needs a frozen base (got recipe={config.recipe.name}). Use "
            "model.quantization=none, or recipe=retrofit."
        )
    if quantization != "none" and is_sharded:
        yield (
            f"model.quantization={quantization} cannot be sharded (got trainer.strategy=fsdp). Use "
            "trainer.strategy=ddp or single."
        )


CHECKS = (
    *(check_job, check_places, check_tasks, check_attention, check_fit),
    *(check_flash, check_top_k, check_recipe, check_processes),
)
