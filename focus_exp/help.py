"""python -m focus_exp --help: one screen; --help group=choice: what that choice is and the keys it takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from focus_exp.config import GROUPS, JOBS, Config
from focus_exp.errors import UserError

PACKAGE = Path(__file__).parent
WIDTH, KEYS = 100, 38  # characters of a line, and of a key with its value
FIRST = ("model", "attention", "regime", "data", "eval", "scale", "trainer")  # groups that most runs choose from
SCREEN = """\
focus_exp: learned sparse attention for frozen language models

  python -m focus_exp +experiment=retrofit_124m                 the main job: train a router
  python -m focus_exp +experiment=retrofit_124m seed=1          with other settings
  python -m focus_exp +experiment=retrofit_124m data=files data.files='texts/*.txt'  your text
  python -m focus_exp -m +experiment=retrofit_124m seed=0,1,2   a sweep (hydra/launcher=slurm)
  python -m focus_exp job=evaluate adapter=<run folder>/adapter measure it again
  python -m focus_exp job=report                                all runs beside the paper's claims

{groups}

Any key of the configuration is changed by key=value. Where to look next:
  --help attention=sparq        the keys of a choice, what they mean and what they are
  --help +experiment=compare    what an experiment does, how long it takes, what it sets
  --help job=report             what a job does and leaves behind, and the keys of every run
  --cfg job                     with a command: its whole configuration; nothing is run
"""


def asked(arguments: list[str]) -> bool:
    return bool({"-h", "--help"} & set(arguments))


def text(arguments: list[str], conf: Path) -> str:
    """The page that these command-line arguments ask for, whose --config-dir counts too. UserError for a choice that
    there is not."""
    own = get_args_parser().parse_args(arguments).config_dir
    if own and not Path(own).is_dir():
        raise UserError(f"--config-dir={own}: there is no such folder")
    folders = [*([Path(own).resolve()] if own else []), conf.resolve()]
    chosen = [argument.lstrip("+").partition("=") for argument in arguments if "=" in argument and argument[0] != "-"]
    pages = [(group, name) for group, _, name in chosen if group == "job" or choices(group, folders)]
    if chosen and not pages:
        key, _, value = chosen[0]
        group = key.partition(".")[0]
        of_group = f"--help {group}=<one of {', '.join(choices(group, folders))}>" if group in GROUPS else ""
        raise UserError(
            f"--help explains choices such as attention=focus, and {key}={value} is none; keys are in "
            + (of_group or "--help job=train")
        )
    if not pages:
        return screen(folders)
    return "\n".join(choice(group, name, folders) for group, name in pages)


def screen(folders: list[Path]) -> str:
    named = {"job=": JOBS, "+experiment=": choices("experiment", folders)}
    named |= {f"{group}=": choices(group, folders) for group in FIRST}
    others = [f"{group}={'|'.join(choices(group, folders))}" for group in GROUPS if group not in FIRST]
    lines = [wrapped(f"  {group:<13}", ", ".join(names)) for group, names in named.items()]
    return SCREEN.format(groups="\n".join([*lines, wrapped("  and ", " ".join(others))]))


def choices(group: str, folders: list[Path]) -> list[str]:
    """The names of a group's files, without the schemas under them."""
    found = {path.stem for conf in folders for path in (conf / group).glob("*.yaml")}
    return sorted(name for name in found if not name.startswith("base_"))


def choice(group: str, name: str, folders: list[Path]) -> str:
    if group == "job" and name in JOBS:
        said = ast.get_docstring(ast.parse((PACKAGE / "jobs" / f"{name}.py").read_text(encoding="utf-8")))
        own = f"Its own keys: --help {name}={choices(name, folders)[0]}\n\n" if name in GROUPS else ""
        return f"{said}\n\n{own}" + "\n".join(keys(OmegaConf.structured(Config))) + "\n"
    path = next((path for conf in folders if (path := conf / group / f"{name}.yaml").is_file()), None)
    if path is None:
        there = JOBS if group == "job" else choices(group, folders)
        raise UserError(f"there is no {group}={name}; choose from {', '.join(there)}")
    text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
    comments = takewhile(lambda line: line.startswith("#"), text.splitlines())
    head = "\n".join(line.removeprefix("#").removeprefix(" ") for line in comments)
    if group == "experiment" or "/" in group:  # a launcher's keys are hydra's
        sets = [f"  {line}" for line in text.splitlines()[head.count("\n") + 1 :] if line]
        return f"{'+' * (group == 'experiment')}{group}={name}\n\n{head}\n\nIt sets:\n" + "\n".join(sets) + "\n"
    *own_folders, conf = folders
    searched = ",".join(["methods://", *(f"file://{folder}" for folder in own_folders)])
    with initialize_config_dir(str(conf), version_base="1.3"):
        values = compose("config", [f"hydra.searchpath=[{searched}]", f"{group}={name}"])[group]
    return f"{group}={name}\n\n{head}\n\n" + "\n".join(keys(values, group)) + "\n"


def keys(values: DictConfig, prefix: str = "") -> Iterator[str]:
    """A line for every key below `prefix`: its value in this choice, what it means, what it may be."""
    schema: Any = OmegaConf.get_type(values)
    for item in fields(schema):
        if item.name == "name" or OmegaConf.is_missing(values, item.name):
            continue
        value, key = values[item.name], f"{prefix}.{item.name}".lstrip(".")
        parts = {key: value} if structured(value) else {f"{key}.{name}": part for name, part in items(value)}
        if parts and all(map(structured, parts.values())):
            for place, part in parts.items():
                yield from keys(part, place)
            continue
        said = "; ".join(filter(None, (item.metadata.get("meaning", ""), allowed(item.metadata))))
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        yield wrapped(f"  {f'{key}={shown}':<{KEYS}} ", said)


def structured(value: Any) -> bool:
    return isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value))


def items(value: Any) -> Any:
    return value.items() if isinstance(value, DictConfig) else ()


def allowed(limits: Any) -> str:
    """What a value may be, in words; "" where everything is."""
    least, most, above = (limits.get(name) for name in ("least", "most", "above"))
    if limits.get("choices"):
        return f"one of {', '.join(limits['choices'])}"
    if most is not None:
        return f"{least} to {most}"
    return f"above {above}" if above is not None else f"{least} or more" if least is not None else ""


def wrapped(head: str, said: str) -> str:
    """`said` beside `head`, or below it where that is long."""
    if len(head) > KEYS + 3:
        return f"{head.rstrip()}\n{wrapped(' ' * (KEYS + 3), said)}".rstrip()
    return fill(said, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) if said else head.rstrip()
