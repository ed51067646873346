"""`python -m focus_exp --help`: one screen; with choices, their YAML files, whose comments describe every key."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from textwrap import fill

from focus_exp.attention.options import did_you_mean
from focus_exp.config import JOBS
from focus_exp.errors import UserError

PACKAGE = Path(__file__).parent
GROUPS = ("model", "attention", "recipe", "data", "eval", "budget")
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
  --cfg job                     with a command: its whole configuration; nothing runs
"""


def wants_help(arguments: list[str]) -> bool:
    return bool({"-h", "--help"} & set(arguments))


def help_text(arguments: list[str], conf: Path) -> str:
    """Return the help that command-line arguments ask for.

    Args:
        arguments: the command line, whose --config-dir is searched first.
        conf: folder of the shipped YAML files.

    Raises:
        UserError: for a choice that does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    own = parser.parse_known_args(arguments)[0].config_dir
    if own and not Path(own).is_dir():
        raise UserError(f"--config-dir={own}: no such folder")
    folders = [*([Path(own)] if own else []), conf]
    chosen = [
        argument.lstrip("+").partition("=")[::2] for argument in arguments if "=" in argument[1:] and argument[0] != "-"
    ]
    if not chosen:
        return SCREEN.format(choices=list_choices(folders))
    return "\n".join(describe_choice(group, name, folders) for group, name in chosen)


def list_choices(folders: list[Path]) -> str:
    named = {"job": list(JOBS), "+experiment": files_of("experiment", folders)}
    named |= {group: files_of(group, folders) for group in GROUPS}
    lines = (
        fill(", ".join(names), 100, initial_indent=f"  {group + '=':<13}", subsequent_indent=" " * 15)
        for group, names in named.items()
    )
    return "\n".join(lines)


def files_of(group: str, folders: list[Path]) -> list[str]:
    return sorted({path.stem for conf in folders for path in (conf / group).glob("*.yaml")} - {"base"})


def describe_choice(group: str, name: str, folders: list[Path]) -> str:
    """Return a job's docstring, or the YAML file of a choice and that of all keys of its group."""
    known = list(JOBS) if group == "job" else files_of(group, folders)
    if not known:
        raise UserError(f"--help takes a job, an experiment or a choice of a group (got {group}={name})")
    if name not in known:
        raise UserError(f"{group} must be one of {', '.join(known)} (got {name}){did_you_mean(name, known)}")
    if group == "job":
        return f"{ast.get_docstring(ast.parse((PACKAGE / 'jobs' / f'{name}.py').read_text(encoding='utf-8')))}\n"
    named = [path for conf in folders if (path := conf / group / f"{name}.yaml").is_file()][:1]
    every_key = [path for conf in folders if (path := conf / group / "base.yaml").is_file()][:1]
    return "\n".join(path.read_text(encoding="utf-8") for path in named + every_key)
