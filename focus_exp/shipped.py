"""The configuration files that come with the project, and what in them is true of their own weights or text alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from focus_exp.config import DataConfig, ModelConfig

Part = TypeVar("Part", ModelConfig, DataConfig)
# where weights or a text lie, and what a file says of those that lie there
PLACE = ("path", "hub_id")
OF_ITS_PLACE: dict[str, dict[str, Any]] = {
    "model": {"revision": None, "architecture": {}, "base_run": []},
    "data": {"revision": None, "subset": None},
}


def conf_dir() -> str:
    """The folder conf/: beside the package in a source tree, inside it when installed."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "conf", here / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError("conf/ is neither beside the package nor in it; install focus_exp again")


@cache
def shipped(group: str) -> dict[str, Any]:
    """The values of every file of a group, by its name."""
    paths = sorted(Path(conf_dir(), group).glob("*.yaml"))
    return {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in paths}


def is_shipped(group: str, hub_id: str | None) -> bool:
    """Whether a file of the group names it: what stands in for it is then part of the experiments here."""
    return any(values.get("hub_id") == hub_id for values in shipped(group).values())


def own(group: str, part: Part) -> Part:
    """`part` without what the file that it is composed from says of another place than the one that it names now.

    Its name, if it is that of a file, becomes the last part of that place: nothing of the user's is called gpt2_124m.
    """

    def place(values: dict[str, Any]) -> list[Any]:
        return [values.get(key) for key in PLACE]

    files = shipped(group).values()
    if place(vars(part)) in map(place, files):
        return part
    foreign = {
        key: nothing
        for key, nothing in OF_ITS_PLACE[group].items()
        if any(values.get(key) and values[key] == getattr(part, key) for values in files)
    }
    last = next((Path(place).name for place in map(vars(part).get, PLACE) if place), part.name)
    return replace(part, **foreign, name=last if part.name in shipped(group) else part.name)
