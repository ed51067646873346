"""--help, and the YAML files whose comments it prints."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from running import succeed

from focus_exp.config import GROUPS, JOBS, Config, conf_dir, find_schema, shipped

CONF = Path(conf_dir())


def file_of_all_keys(group):
    return next(path for name in ("base", "default") if (path := CONF / group / f"{name}.yaml").is_file())


KEYS = [(group, file_of_all_keys(group), schema) for group, schema in GROUPS.items() if group != "attention"]
KEYS += [
    (f"attention={path.stem}", path, find_schema(OmegaConf.load(path)["method"]))
    for path in sorted((CONF / "attention").glob("*.yaml"))
]


def commented_keys(path):
    """Return the top-level keys of a YAML file that have a comment next to them or above them."""
    keys, above = set(), False
    for line in path.read_text(encoding="utf-8").splitlines():
        key, colon, rest = line.partition(":")
        if colon and key.isidentifier() and (above or " # " in rest):
            keys.add(key)
        above = line.startswith("#")
    return keys


@pytest.mark.parametrize(("group", "path", "schema"), KEYS, ids=[group for group, *_ in KEYS])
def test_conf_every_key_stands_with_a_comment(group, path, schema):
    assert commented_keys(path) - {"defaults"} == {item.name for item in fields(schema)}


def test_conf_top_level_keys_stand_with_a_comment():
    top_level = {item.name for item in fields(Config) if item.name not in {*GROUPS, "budget"}}
    assert commented_keys(CONF / "config.yaml") - {"defaults", "hydra"} == top_level


@pytest.mark.parametrize(("group", "path", "schema"), [row for row in KEYS if row[1].stem == "base"])
def test_conf_base_file_holds_the_schema_defaults(group, path, schema):
    values = OmegaConf.load(path)
    del values["defaults"]
    for item in fields(schema):
        if OmegaConf.is_missing(values, item.name) or is_dataclass(item.default_factory):
            continue
        default = OmegaConf.structured(schema)[item.name]
        if default is not None or not OmegaConf.is_dict(values[item.name]):  # a dict: of a group that may be null
            assert values[item.name] == default


def test_help_names_every_choice():
    words = set(re.split(r"[\s,:]+", succeed("--help").out))
    choices = {path.stem for group in GROUPS for path in (CONF / group).glob("*.yaml")}
    assert {*choices, *JOBS, *shipped("variant")["compare"]} <= words
