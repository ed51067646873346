"""Checks that need more than a type: refuse what is well-typed but impossible, naming key, value and fix."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from focus_exp.assets import find_adapter
from focus_exp.attention.options import FitOptions, did_you_mean, validate_options
from focus_exp.config import GROUPS, Config, PhaseConfig, renamed_key_reason
from focus_exp.config_attention import KNOWN, AttentionConfig, FocusConfig, schema_of
from focus_exp.errors import UserError, not_installed
from focus_exp.launcher import is_requeued
from focus_exp.shipped import own, shipped

# what others call a key
ALSO_CALLED = {"max_steps": "steps", "lr": "learning_rate"}
PERPLEXITY = "perplexity"  # perplexity@<tokens>: the one task that is not lm-eval's


def parse(composed: DictConfig) -> Config:
    """The composed configuration as dataclasses, checked; UserError names key, value and fix."""
    refuse_unknown_keys(composed)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise UserError(f"{missing[0]} has no value; give it as {missing[0]}=...")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.overwrite = config.overwrite and not is_requeued()  # a requeued job resumes what it began
    if "@" in (config.model.hub_id or ""):
        config.model.hub_id, _, config.model.revision = str(config.model.hub_id).partition("@")
    config.model, config.data = own("model", config.model), own("data", config.data)
    validate(config)
    if config.adapter:  # a folder from here on: what is in it decides the name of the run
        config.adapter = str(find_adapter(config.adapter))
    config.eval.adapters = [str(find_adapter(adapter)) for adapter in config.eval.adapters]
    return config


def refuse_unknown_keys(composed: DictConfig, prefix: str = "") -> None:
    """UserError for a key that no schema has: OmegaConf lets +key=value add some, which nothing would read."""
    schema = OmegaConf.get_type(composed)
    names = [f.name for f in fields(schema)] if isinstance(schema, type) and is_dataclass(schema) else None
    for key in map(str, composed):
        if names is not None and key not in names:
            raise UserError(no_such_key(prefix + key, schema))
        if not OmegaConf.is_missing(composed, key) and isinstance(composed[key], DictConfig):
            refuse_unknown_keys(composed[key], f"{prefix}{key}.")


def no_such_key(key: str, schema: Any) -> str:
    """That the schema has no such dotted key, and which come nearest, or have that name elsewhere."""
    if reason := renamed_key_reason(key):
        return reason
    group, _, name = key.rpartition(".")
    method = "full attention" if schema is AttentionConfig else schema.__name__.removesuffix("Config")
    lacks = f"{method} has no option" if group == "attention" else "there is no key"
    homes = GROUPS | {"attention": FocusConfig, "recipe.phases.<phase>": PhaseConfig}
    del homes["budget"]  # which only experiments read
    ours = ALSO_CALLED.get(name, name)
    elsewhere = [f"{home}.{ours}" for home, part in homes.items() if ours in (item.name for item in fields(part))]
    owners = [method for method, known in KNOWN.items() if name in (item.name for item in fields(known))]
    if group == "attention" and owners:
        return f"{lacks} {key}; it is one of attention={' and attention='.join(owners)}"
    if elsewhere:
        return f"{lacks} {key}; did you mean {' or '.join(elsewhere)}?"
    return f"{lacks} {key}{did_you_mean(name, [item.name for item in fields(schema)])}"


def validate(config: Config) -> None:
    """Refuse what no run can be made of."""
    try:
        validate_options(config)
    except ValueError as error:
        raise UserError(str(error)) from None
    validate_tasks(config.eval.tasks)
    measured = config.eval.tasks if config.job in ("train", "evaluate", "compare") else []
    # before the hours of training, not after
    if any(not task.startswith(f"{PERPLEXITY}@") for task in measured) and find_spec("lm_eval") is None:
        raise UserError(f"eval.tasks: {not_installed('lm_eval')}")
    if config.job == "compare" and not config.variants:
        raise UserError("job=compare needs variants, such as those of +experiment=compare. Add variants=[...].")
    if config.adapter and config.job == "train":
        raise UserError(f"adapter={config.adapter} is for job=evaluate; add job=evaluate, or leave adapter out")
    if config.job == "analyze" and config.analyze.passage_tokens > config.eval.seq_len:
        raise UserError(
            f"analyze.passage_tokens={config.analyze.passage_tokens} exceeds eval.seq_len={config.eval.seq_len}, of "
            "which the passage is a part; use less, or a longer window"
        )
    validate_attention(config)
    validate_recipe(config)
    validate_generate(config)
    validate_architecture(config)
    hub_id = config.model.hub_id or ""
    too_deep = hub_id.partition(":")[0].count("/") > 1
    if hub_id.startswith((".", "/", "~")) or too_deep or (hub_id and Path(hub_id).exists()):
        raise UserError(f"model.hub_id={hub_id} is a folder, not owner/name of the hub; write model.path={hub_id}")
    if config.data.files and config.data.source != "files":
        raise UserError(f"data.files={config.data.files} is read with data=files alone; add data=files")
    if config.data.source == "files" and not config.data.files:
        raise UserError("data=files needs data.files=<folder or glob of text files>")
    if config.data.source == "hub" and not config.data.hub_id:
        raise UserError("data.source=hub needs data.hub_id")
    if not (config.model.path or config.model.hub_id or config.model.architecture or config.model.base_run):
        raise UserError(f"model {config.model.name} has neither path, nor hub_id, nor architecture")


def validate_architecture(config: Config) -> None:
    """UserError where weights that are there are to have another architecture than theirs; dropout is no part of it."""
    model = config.model
    place = model.path or model.hub_id
    if not place or config.recipe.from_scratch or config.job == "plan":
        return
    known = [{}, *(values.get("architecture", {}) for values in shipped("model").values())]
    given = [{key for key, value in model.architecture.items() if value != of.get(key)} for of in known]
    if changed := sorted(key for key in min(given, key=len) if "drop" not in key):
        raise UserError(
            f"model.architecture.{changed[0]}={model.architecture[changed[0]]} is for random weights, and those of "
            f"{place} have an architecture of their own; leave it out, or use model.hub_id=null model.path=null"
        )


def validate_tasks(tasks: list[str]) -> None:
    for task in tasks:
        kind, at, length = task.partition("@")
        if (at or kind == PERPLEXITY) and (not length.isdecimal() or int(length) < 2):
            raise UserError(f"eval.tasks holds {task}; give its length as a whole number, such as {kind}@1024")
        if tasks.count(task) > 1:
            raise UserError(f"eval.tasks holds {task} more than once; leave it out once")


def validate_generate(config: Config) -> None:
    dual, asked, prompt = config.dual, config.generate.top_k, config.generate.prompt_tokens
    if config.job == "generate" and prompt >= config.eval.seq_len:
        raise UserError(
            f"generate.prompt_tokens={prompt} leaves nothing of eval.seq_len={config.eval.seq_len} to go on with; use "
            "less, or a longer window"
        )
    if asked and dual and dual.budgeted:
        raise UserError(
            f"generate.top_k={asked} does not go with a budget, which says how many groups each head reads; leave "
            "generate.top_k empty, or attention.density and attention.groups_per_layer out"
        )
    groups = dual.groups if dual else config.focus.groups if config.has_router else 0
    if config.has_router and config.eval.top_k and not any(1 <= k <= groups for k in config.eval.top_k):
        raise UserError(f"eval.top_k={config.eval.top_k} is impossible; use 1 to attention.groups={groups}")
    for k in asked if groups else []:
        if not 1 <= k <= groups:
            raise UserError(f"generate.top_k holds {k}; use 1 to attention.groups={groups}")


def validate_attention(config: Config) -> None:
    attention = config.attention
    if type(attention) is not schema_of(attention.method):
        raise UserError(
            f"attention.method={attention.method} does not go with attention={attention.name}, which is of another "
            "method; choose one with attention=<name>"
        )
    if config.eval.adapters and attention.method == "full":
        raise UserError(
            f"eval.adapters={config.eval.adapters} are measured in place of a method, and attention={attention.name} "
            "attaches none; leave eval.adapters empty, or measure one as the run itself with job=evaluate adapter=..."
        )
    if isinstance(attention, FitOptions) and 0 < attention.calibration_sequences <= attention.validation_sequences:
        raise UserError(
            f"attention.calibration_sequences={attention.calibration_sequences} must be greater than "
            f"attention.validation_sequences={attention.validation_sequences}. Give more, or hold out fewer."
        )
    dual = config.dual
    if dual and dual.density is not None and (dual.groups_per_layer is not None or not dual.calibration_sequences):
        other = (
            "attention.groups_per_layer, which is a budget already"
            if dual.groups_per_layer
            else "attention.calibration_sequences=0"
        )
        raise UserError(f"attention.density={dual.density} does not go with {other}; leave one of them out")


def validate_recipe(config: Config) -> None:
    recipe = config.recipe
    if recipe.trains("lora") and config.has_router:
        raise UserError(
            f"recipe={recipe.name} trains LoRA in place of a router, but attention={config.attention.name} has one; "
            "use attention=full, or recipe=retrofit"
        )
    if recipe.trains("lora") and recipe.trains("all"):
        raise UserError(f"recipe={recipe.name} trains both LoRA and the weights under it; leave one of them out")
    trains_router_only = bool(recipe.phases) and all(phase.trainable == "router" for phase in recipe.phases.values())
    if trains_router_only and not (config.has_router or config.dual):
        raise UserError(
            f"recipe={recipe.name} trains only a router, but attention={config.attention.name} has none; "
            "use attention=focus, or recipe=none to measure it as it is, or recipe=finetune"
        )
    for name, phase in recipe.phases.items():
        if phase.objective == "distill" and phase.trainable != "router":
            raise UserError(
                f"recipe.phases.{name}.objective=distill must go with trainable: router "
                f"(got {phase.trainable}). Use objective=lm."
            )
    if recipe.tune.factors and config.eval.split == "validation":
        raise UserError(
            f"recipe.tune.factors={recipe.tune.factors} are chosen from by the loss on validation text, which "
            "eval.split=validation would report as held out; use eval.split=test, or recipe.tune.factors=[]"
        )
    if recipe.tune.factors and config.job in ("analyze", "bench", "generate") and not config.adapter:
        raise UserError(
            f"recipe.tune.factors={recipe.tune.factors} are tried by job=train and job=compare, not by "
            f"job={config.job}; use recipe.tune.factors=[], or train first and give adapter=<run folder>/adapter"
        )
    if recipe.from_scratch and not recipe.trains("all"):
        raise UserError(f"recipe={recipe.name} starts from random weights but no phase trains them; add train: all")
