"""Command-line arguments: their order for Hydra, and what to type instead of a mistake."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

from focus_exp.attention.options import did_you_mean
from focus_exp.checks import unknown_key_reason
from focus_exp.config import conf_dir, shipped
from focus_exp.errors import UserError, first_line

# Hydra's options with a value
VALUED = (
    *("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"),
    *("--info", "--experimental-rerun"),
)


def order_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments with options such as -m first, as Hydra needs them.

    Raises:
        UserError: for an argument that is neither an option nor a setting.
    """
    options, settings, rest = list[str](), list[str](), deque(arguments)
    while rest:
        argument = rest.popleft()
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            check_setting(argument)
            settings.append(argument.replace("=~/", f"={Path.home()}/", 1))  # shells leave it, Hydra cannot read it
        elif equals and name not in VALUED:
            raise UserError(f"{name} is not an option. Type {name.lstrip('-')}={value}, without dashes.")
        else:
            options.append(argument)
            if rest and argument in VALUED:
                options.append(rest.popleft())
    return [*options, *settings]


def pop_option(arguments: list[str], *names: str) -> str | None:
    """Remove an option with a value, `--name value` or `--name=value`, from ordered arguments; returns its value."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names and (equals or index + 1 < len(arguments)):
            del arguments[index]
            return value if equals else arguments.pop(index)
    return None


def check_setting(argument: str) -> None:
    """Raise UserError for an argument that is not key=value."""
    if "=" in argument.strip("=") or argument.startswith("~"):
        key = argument.lstrip("+~").partition("=")[0]
        if argument.lower() == f"{key}=null" and (choices := sorted({*shipped(key)} - {"base"})):
            raise UserError(f"{key} must be a choice (got null){did_you_mean('', choices)}")
        return
    name = Path(argument).stem
    if Path(conf_dir(), "experiment", f"{name}.yaml").is_file():
        raise UserError(f"{argument} is not a setting. Type +experiment={name}.")
    raise UserError(f"{argument} is not a setting. Type key=value without spaces, such as attention=focus.")


def quote(text: str) -> str:
    """Quote a text for Hydra's grammar."""
    quoted: str = QuotedString(text=text, quote=Quote.single).with_quotes()
    return quoted


# lines of its messages that are of no use
NOISE = ("reference_type=", "object_type=", "Config search path", "provider=", "See https")
# group -> what to type for what is no choice of it
OTHERS = {
    "model": " (or type model.hub_id=owner/name for a model on the Hub)",
    "hydra/launcher": " (or pip install 'focus_exp[slurm]' or 'focus_exp[sweeps]')",
}


def explain_error(error: Exception) -> str:
    """Return an error of Hydra in one message, of a name that does not exist with the nearest that does."""
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read ({first_line(error)}). Quote special characters: \"key='a=b, c'\"."
    lines = [line.strip() for part in (error, error.__cause__) if part for line in str(part).splitlines()]
    message = "\n  ".join(dict.fromkeys(line for line in lines if line and not line.startswith(NOISE)))
    if match := re.search(r"Key '\w+' (?:not in '\w+'|is not in struct)\s+full_key: (\S+)", message):
        return unknown_key_reason(match[1])
    if match := re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)':", message):
        group, name = match[2], match[1].removeprefix(f"{match[2]}/")
        choices = [choice for choice in message[match.end() :].split() if not re.match(r"base(_|$)", choice)]
        inside, slash, _ = name.rpartition("/")
        if slash and (variants := shipped(group).get(inside)):
            choices = [f"{inside}/{variant}" for variant in variants]
        return f"{group}={name} does not exist{did_you_mean(name, choices)}{OTHERS.get(group, '')}"
    return message
