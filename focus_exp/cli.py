"""Command-line arguments: order and quoting for Hydra, help, and what to type instead of a mistake."""

from __future__ import annotations

import ast
import os
import re
from collections import deque
from functools import cache
from pathlib import Path
from textwrap import fill

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

from focus_exp.attention.options import TYPE_NAMES, did_you_mean
from focus_exp.checks import unknown_key_reason
from focus_exp.config import JOBS, conf_dir, list_keys
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
            settings.append(argument)
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
        if argument.lower() == f"{key}=null" and (choices := find_choices(key)):
            raise UserError(f"{key} must be a choice (got null){did_you_mean('', choices)}")
        return
    name = Path(argument).stem
    if Path(conf_dir(), "experiment", f"{name}.yaml").is_file():
        raise UserError(f"{argument} is not a setting. Type +experiment={name}.")
    raise UserError(f"{argument} is not a setting. Type key=value without spaces, such as attention=focus.")


# quoting

PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_./][\w./@-]*", re.IGNORECASE | re.ASCII)
QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)
RESERVED = re.compile(r"null|\?\?\?|.*\$\{.*", re.IGNORECASE | re.DOTALL)  # null, no value, interpolations
SWEEP_FUNCTION = re.compile(r"(choice|glob|range|interval|sort|shuffle|extend_list)\(")
ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")  # Hydra's escapes outside of quotes
# an element of a list, including commas within quotes or brackets
ELEMENT = re.compile(
    r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?:\[[^\[\]]*\]|\([^()]*\)|\{[^{}]*\}|[^,])*?)\s*(?:,|$)""", re.DOTALL
)


def quote_override(override: str, is_sweep: bool = False) -> str:
    """Quote the value of `key=value` if the key holds text or a list of texts, so that any path is taken literally.

    Args:
        override: as typed; quoted values are kept.
        is_sweep: a comma outside of quotes separates the values of a sweep.
    """
    key, _, value = override.partition("=")
    if value.startswith("~/"):  # shells expand it at the start of an argument only
        value = os.path.expanduser(value)
    name = key.lstrip("+")
    texts, lists = find_text_keys()
    is_list = name in lists or f"{name.rpartition('.')[0]}.*" in lists
    if not value or key.startswith(("-", "~")) or not (is_list or name in texts) or RESERVED.fullmatch(value):
        if not value or key.startswith("-") or set(value) & set("\\'\"()[]{}"):
            return override
        return f"{key}=" + value.replace("=", "\\=")
    if is_sweep and SWEEP_FUNCTION.match(value):
        return override
    quote = quote_list if is_list else quote_text
    return f"{key}={','.join(map(quote, split_elements(value))) if is_sweep else quote(value)}"


def quote_text(text: str) -> str:
    """Quote `text` for Hydra's grammar unless it is quoted or needs no quotes."""
    if QUOTED.fullmatch(text) or PLAIN.fullmatch(text):
        return text
    quoted: str = QuotedString(text=ESCAPED.sub(r"\1", text), quote=Quote.single).with_quotes()
    return quoted


def quote_list(value: str) -> str:
    if not (value.startswith("[") and value.endswith("]")):
        return quote_text(value)
    return f"[{','.join(map(quote_text, split_elements(value[1:-1])))}]"


def split_elements(values: str) -> list[str]:
    return [match[1] for match in ELEMENT.finditer(values) if match[1]]


@cache
def find_text_keys() -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys of texts, and those of lists of texts (`tables.*`: of every key below)."""
    texts, lists = set(), set()
    for key, (kind, limits) in list_keys().items():
        if kind in (str, str | None) and not limits.get("choices"):
            texts.add(key)
        elif kind == list[str]:
            lists.add(key)
        elif kind == dict[str, list[str]]:
            lists.add(f"{key}.*")
    return frozenset(texts - {"experiment", "variant"}), frozenset(lists)  # these two choose files


# help

HELP_GROUPS = ("model", "attention", "recipe", "data", "eval", "budget")
SCREEN = """\
focus_exp: learned sparse attention for frozen language models

  python -m focus_exp +experiment=retrofit_124m                 train a router and measure it
  python -m focus_exp +experiment=retrofit_124m seed=1          with other settings
  python -m focus_exp +experiment=retrofit_124m data=files data.files='texts/*.txt'   on your text
  python -m focus_exp -m +experiment=retrofit_124m seed=0,1,2   a sweep (hydra/launcher=slurm)
  python -m focus_exp +experiment=compare                       several methods in one table
  python -m focus_exp job=evaluate adapter=<run folder>/adapter measure an adapter
  python -m focus_exp job=report                                all runs against the paper's claims

{choices}

  --help attention=sparq        every key of a choice, with its meaning
  --help +experiment=compare    what an experiment does and sets
  --help job=report             what a job does
  --cfg job                     with a command: what it runs, also with -m; nothing runs
"""


def help_text(arguments: list[str]) -> str:
    """Return the help that arguments ask for: one screen, or the files of the choices among them.

    Raises:
        UserError: for a choice that does not exist.
    """
    choices = [a.lstrip("+").split("=", 1) for a in arguments if "=" in a and not a.startswith("-")]
    if choices:
        return "\n".join(describe_choice(group, name) for group, name in choices)
    names = {"job": list(JOBS), "+experiment": find_choices("experiment")}
    names |= {group: find_choices(group) for group in HELP_GROUPS}
    lines = (
        fill(", ".join(values), 100, initial_indent=f"  {group + '=':<13}", subsequent_indent=" " * 15)
        for group, values in names.items()
    )
    return SCREEN.format(choices="\n".join(lines))


def find_choices(group: str) -> list[str]:
    return sorted(path.stem for path in Path(conf_dir(), group).glob("*.yaml") if path.stem != "base")


def describe_choice(group: str, name: str) -> str:
    """Return a job's docstring, or the YAML of a choice, all keys of its group, and an experiment's variants."""
    names = list(JOBS) if group == "job" else find_choices(group)
    if not names:
        raise UserError(f"--help must have a job, an experiment or a choice of a group (got {group}={name}).")
    if name not in names:
        raise UserError(f"{group} must be an existing choice (got {name}){did_you_mean(name, names)}")
    if group == "job":
        source = Path(__file__).with_name("jobs") / f"{JOBS[name]}.py"  # not imported: torch takes seconds
        nodes = ast.parse(source.read_text(encoding="utf-8")).body
        (function,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
        return f"job={name}: {ast.get_docstring(function)}\n"
    files = [Path(conf_dir(), group, f"{name}.yaml"), Path(conf_dir(), group, "base.yaml")]
    files += [Path(conf_dir(), "variant", f"{name}.yaml")] if group == "experiment" else []
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())


# errors of Hydra

# lines of its messages that are of no use, or mislead
NOISE = ("To append to your config", "reference_type=", "object_type=", "Config search path", "provider=", "See https")
KINDS = {"Integer": TYPE_NAMES[int], "Float": TYPE_NAMES[float], "Boolean": TYPE_NAMES[bool]}
# pattern -> message, filled in with the groups
MESSAGES = {
    r"To append to your default list use \+(?P<group>\S+?)=(?P<name>\S+)": (
        "{group} must be added with a plus (got {group}={name}). Type +{group}={name}."
    ),
    r"Ambiguous value for argument '(?P<argument>(?P<key>[^=]+)=(?P<values>[^']*))'": (
        "{key} must have one value (got {argument}). Type -m for a sweep, or {key}=[{values}] for a list."
    ),
    r"Multiple values for (?P<group>\w+)\.": "{group} must be chosen once. Type -m +{group}=a,b for a sweep.",
    r"An item is already at '(?P<key>[^']+)'": "{key} must be set without the plus. Type {key}=...",
    r"Error merging override (?P<key>\S+?)=(?P<value>[^\n]*)\n[\s\S]*is not a ListConfig": (
        "{key} must be a list (got {value}). Type {key}=[{value}]."
    ),
    r"Value '(?P<value>[\s\S]*)' of type '\w+' could not be converted to (?P<kind>\w+)\s+full_key: (?P<key>\S+)": (
        "{key} must be {kind} (got {value})"
    ),
    r"Error merging override (?P<key>\S+?)=null\n[\s\S]*is not Optional": (
        "{key} must have a value (got null). Leave it out for its default."
    ),
    r"launcher/submitit_slurm": "hydra/launcher=slurm needs hydra-submitit-launcher: pip install 'focus_exp[slurm]'",
    r"launcher/joblib": "hydra/launcher=joblib needs hydra-joblib-launcher: pip install 'focus_exp[sweeps]'",
    r"Could not find 'variant/(?P<name>[^']+)'": (
        "+variant must be <experiment>/<name> of conf/variant/<experiment>.yaml (got {name})"
    ),
}


def explain_error(error: Exception) -> str:
    """Return an error of Hydra in one message."""
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read ({first_line(error)}). Close every bracket and quote in it."
    lines = [line.strip() for part in (error, error.__cause__) if part for line in str(part).splitlines()]
    message = "\n  ".join(dict.fromkeys(line for line in lines if line and not line.startswith(NOISE)))
    for pattern, template in MESSAGES.items():
        if match := re.search(pattern, message):
            groups = match.groupdict()
            return template.format(**groups | {"kind": KINDS.get(groups.get("kind", ""), groups.get("kind"))})
    if match := re.search(r"Key '\w+' (?:not in '\w+'|is not in struct)\s+full_key: (\S+)", message):
        return unknown_key_reason(match[1])
    if match := re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)':", message):
        group, name = match[2], match[1].removeprefix(f"{match[2]}/")
        choices = [choice for choice in message[match.end() :].split() if not re.match(r"base(_|$)", choice)]
        other = " (or type model.hub_id=owner/name for a model on the Hub)" if group == "model" else ""
        return f"{group}={name} does not exist{did_you_mean(name, choices)}{other}"
    return message
