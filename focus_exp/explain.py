"""What the command line is told in a form that it cannot take: put in order, or answered with what to type."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import is_dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.errors import OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from focus_exp.attention.options import did_you_mean
from focus_exp.checks import no_such_key
from focus_exp.config import GROUPS, Config, renamed_key_reason
from focus_exp.config_attention import KNOWN
from focus_exp.errors import UserError, first_line

# lines of hydra's messages that help nobody, or mislead
NOISE = ("To append to your config", "reference_type=", "object_type=", "Config search path", "provider=", "See https")
COMPLETION = re.compile(r"(install|uninstall|query)=(bash|zsh|fish)")
QUOTED = """'eval.adapters=["runs/a/adapter"]'"""
CONVERSION = re.compile(
    r"Value '(?P<value>[\s\S]*)' of type '\w+' could not be converted to (?P<kind>\w+)\s+full_key: (?P<key>\S+)"
)
KINDS = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}
# hydra's message -> what is wrong and what to type, filled in with its groups
SENTENCES = {
    r"To append to your default list use \+(?P<group>\S+?)=(?P<name>\S+)": (
        "{group} is no part of every run: it is added with a plus, +{group}={name}"
    ),
    r"Ambiguous value for argument '(?P<given>(?P<key>[^=]+)=(?P<values>[^']*))'": (
        "{given} holds several values: add -m to run each as a job of its own; a key of a list takes {key}=[{values}]"
    ),
    r"Multiple values for (?P<group>\w+)\.": "{group} is chosen twice: once is a run, and -m +{group}=a,b is a sweep",
    r"An item is already at '(?P<key>[^']+)'": "{key} is a key of every run: write it without the plus, {key}=...",
    r"Error merging override (?P<key>\S+?)=(?P<value>[^\n]*)\n[\s\S]*is not a ListConfig": (
        "{key} is a list: {key}=[{value}]"
    ),
    r"Cannot find primary config '(?P<name>[^']+)'": (
        "--config-name={name}: leave the option out; an experiment is +experiment=<name>, and YAML files of yours are "
        "found with --config-dir=<folder>"
    ),
    r"Additional config directory '(?P<folder>[^']+)' not found": "--config-dir={folder}: there is no such folder",
    r"launcher/submitit_slurm": (
        "hydra/launcher=slurm needs the package hydra-submitit-launcher: pip install 'focus_exp[slurm]'"
    ),
    r"launcher/joblib": "hydra/launcher=joblib needs hydra-joblib-launcher: pip install 'focus_exp[sweeps]'",
}


def arranged(arguments: list[str], conf: Path) -> list[str]:
    """The arguments with options such as -m first, wherever they were typed. UserError for what is neither option nor
    setting. conf: the folder of the YAML files."""
    known = get_args_parser()._option_string_actions
    options, settings, rest = list[str](), list[str](), deque(arguments)
    while rest:
        given = rest.popleft()
        name, _, value = given.partition("=")
        if not given.startswith("-"):
            settings.append(checked(given, conf))
            continue
        if name not in known:
            raise UserError(f"there is no option {name}; settings have no dashes: {name.lstrip('-')}={value or '...'}")
        options.append(given)
        takes = known[name].nargs != 0 and given == name
        if takes and rest and (known[name].nargs is None or rest[0] in (known[name].choices or ())):
            options.append(rest.popleft())
    if {"-sc", "--shell-completion"} & set(options) and not any(map(COMPLETION.fullmatch, settings)):
        raise UserError("--shell-completion takes a shell: install=bash, install=zsh or install=fish, run through eval")
    return [*options, *settings]


def checked(given: str, conf: Path) -> str:
    """A setting; UserError for an argument that is none."""
    if "=" in given.strip("=") or given.startswith("~"):
        key = given.lstrip("+~").partition("=")[0]
        if not key.startswith("attention.") and (reason := renamed_key_reason(key)):  # a method's options are its own
            raise UserError(reason)
        if key == "hydra.run.dir":
            raise UserError(
                f"hydra.run.dir is not used: runs name their own folders. Type runs_dir={given.partition('=')[2]}."
            )
        return given
    name = Path(given).stem
    if (conf / "experiment" / f"{name}.yaml").is_file():
        raise UserError(f"{given} is no setting; the experiment is +experiment={name}")
    if given.endswith((".yaml", ".yml")):
        raise UserError(f"{given}: a YAML file is not given by its path but chosen by name, with --config-dir=<folder>")
    raise UserError(f"{given} is no setting; write key=value, without spaces, such as attention=focus")


def explain(error: Exception) -> str:
    """What to type instead, after what was noted of the error: the arm of a comparison whose settings these are."""
    return ": ".join([*getattr(error, "__notes__", []), instead_of(error)])


def instead_of(error: Exception) -> str:
    """The same where it is known, else hydra's message, its cause, and the nearest name that exists."""
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read ({first_line(error)}); close every bracket and quote in it"
    lines = [line.strip() for part in (error, error.__cause__) if part for line in str(part).splitlines()]
    message = "\n  ".join(dict.fromkeys(line for line in lines if line and not line.startswith(NOISE)))
    if found := CONVERSION.search(message):
        return f"{found['key']} must be {KINDS.get(found['kind'], found['kind'])} (got {found['value']})"
    for pattern, sentence in SENTENCES.items():
        if found := re.search(pattern, message):
            return sentence.format(**found.groupdict())
    cause = error.__cause__ or error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and is_dataclass(cause.object_type):
        return no_such_key(str(cause.full_key), cause.object_type)
    if found := re.search(r"Key '\w+' not in '(\w+)'\s+full_key: (\S+)", message):  # of a file, not of the command line
        schemas = {
            str(getattr(schema, "__name__", "")): schema for schema in (*GROUPS.values(), *KNOWN.values(), Config)
        }
        if found[1] in schemas:
            return no_such_key(found[2], schemas[found[1]])
    if found := re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)':", message):
        group, name = found[2], found[1].removeprefix(f"{found[2]}/")
        choices = [choice for choice in message[found.end() :].split() if not choice.startswith("base_")]
        other = " (any causal model of the hub is model.hub_id=owner/name)" if group == "model" else ""
        return f"there is no {group}/{name}{did_you_mean(name, choices)}{other}"
    if found := re.search(r"Could not find 'variant/([^']+)'", message):
        return f"+variant must be <experiment>/<name> of a file below conf/variant (got {found[1]})"
    return message
