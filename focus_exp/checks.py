"""Checks that need more than a type: refuse what is well-typed but impossible, naming key, value and fix."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from focus_exp.assets import adapter_folder
from focus_exp.attention.options import FitOptions, check, instead
from focus_exp.config import GROUPS, Config, PhaseConfig
from focus_exp.config_attention import KNOWN, AttentionConfig, FocusConfig, schema_of
from focus_exp.errors import UserError, not_installed
from focus_exp.launcher import is_requeued
from focus_exp.shipped import own, shipped

# what others call a key
ALSO_CALLED = {"max_steps": "steps", "lr": "learning_rate"}
# keys of earlier versions -> what to type now
NOW_TYPED = {
    "arm": "+variant=<experiment>/<name>",
    "arms": "variants=[<names of files in conf/variant>]",
    "every_arm": "shared_variant=<file in conf/variant>",
    "against": "references=[...]",
}
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
        config.adapter = str(adapter_folder(config.adapter))
    config.eval.adapters = [str(adapter_folder(adapter)) for adapter in config.eval.adapters]
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
    if key.partition(".")[0] in NOW_TYPED:
        return f"{key.partition('.')[0]} is no longer a key. Type {NOW_TYPED[key.partition('.')[0]]}."
    group, _, name = key.rpartition(".")
    method = "full attention" if schema is AttentionConfig else schema.__name__.removesuffix("Config")
    lacks = f"{method} has no option" if group == "attention" else "there is no key"
    homes = GROUPS | {"attention": FocusConfig, "regime.phases.<phase>": PhaseConfig}
    del homes["scale"]  # which only experiments read
    ours = ALSO_CALLED.get(name, name)
    elsewhere = [f"{home}.{ours}" for home, part in homes.items() if ours in (item.name for item in fields(part))]
    owners = [method for method, known in KNOWN.items() if name in (item.name for item in fields(known))]
    if group == "attention" and owners:
        return f"{lacks} {key}; it is one of attention={' and attention='.join(owners)}"
    if elsewhere:
        return f"{lacks} {key}; did you mean {' or '.join(elsewhere)}?"
    return f"{lacks} {key}{instead(name, [item.name for item in fields(schema)])}"


def validate(config: Config) -> None:
    """Refuse what no run can be made of."""
    try:
        check(config)
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
    if config.job == "analyze" and config.analyze.passage_tokens > config.eval.window:
        raise UserError(
            f"analyze.passage_tokens={config.analyze.passage_tokens} exceeds eval.window={config.eval.window}, of "
            "which the passage is a part; use less, or a longer window"
        )
    validate_attention(config)
    validate_regime(config)
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
    if not (config.model.path or config.model.hub_id or config.model.architecture or config.model.trained_by):
        raise UserError(f"model {config.model.name} has neither path, nor hub_id, nor architecture")


def validate_architecture(config: Config) -> None:
    """UserError where weights that are there are to have another architecture than theirs; dropout is no part of it."""
    model = config.model
    place = model.path or model.hub_id
    if not place or config.regime.from_scratch or config.job == "plan":
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
    if config.job == "generate" and prompt >= config.eval.window:
        raise UserError(
            f"generate.prompt_tokens={prompt} leaves nothing of eval.window={config.eval.window} to go on with; use "
            "less, or a longer window"
        )
    if asked and dual and dual.budgeted:
        raise UserError(
            f"generate.top_k={asked} does not go with a budget, which says how many groups each head reads; leave "
            "generate.top_k empty, or attention.pairs and attention.budget out"
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
    if isinstance(attention, FitOptions) and 0 < attention.fit_blocks <= attention.fit_held_out:
        raise UserError(
            f"attention.fit_blocks={attention.fit_blocks} leaves no text to fit to beside "
            f"attention.fit_held_out={attention.fit_held_out} blocks; give more blocks, or hold out fewer"
        )
    dual = config.dual
    if dual and dual.pairs is not None and (dual.budget is not None or not dual.fit_blocks):
        other = "attention.budget, which is a budget already" if dual.budget else "attention.fit_blocks=0"
        raise UserError(f"attention.pairs={dual.pairs} does not go with {other}; leave one of them out")


def validate_regime(config: Config) -> None:
    regime = config.regime
    if regime.trains("lora") and config.has_router:
        raise UserError(
            f"regime={regime.name} trains LoRA in place of a router, but attention={config.attention.name} has one; "
            "use attention=full, or regime=retrofit"
        )
    if regime.trains("lora") and regime.trains("all"):
        raise UserError(f"regime={regime.name} trains both LoRA and the weights under it; leave one of them out")
    trains_router_only = bool(regime.phases) and all(phase.train == "router" for phase in regime.phases.values())
    if trains_router_only and not (config.has_router or config.dual):
        raise UserError(
            f"regime={regime.name} trains only a router, but attention={config.attention.name} has none; "
            "use attention=focus, or regime=none to measure it as it is, or regime=finetune"
        )
    for name, phase in regime.phases.items():
        if phase.aim == "base" and phase.train != "router":
            raise UserError(
                f"regime.phases.{name}.aim=base compares with the model without its router, but the phase trains "
                f"{phase.train}; use aim=text, or train: router"
            )
    if regime.tune.factors and config.eval.split == "validation":
        raise UserError(
            f"regime.tune.factors={regime.tune.factors} are chosen from by the loss on validation text, which "
            "eval.split=validation would report as held out; use eval.split=test, or regime.tune.factors=[]"
        )
    if regime.tune.factors and config.job in ("analyze", "bench", "generate") and not config.adapter:
        raise UserError(
            f"regime.tune.factors={regime.tune.factors} are tried by job=train and job=compare, not by "
            f"job={config.job}; use regime.tune.factors=[], or train first and give adapter=<run folder>/adapter"
        )
    if regime.from_scratch and not regime.trains("all"):
        raise UserError(f"regime={regime.name} starts from random weights but no phase trains them; add train: all")
