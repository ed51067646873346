"""--help: one screen, and a page for every choice with the keys that it takes."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from running import run

from focus_exp.__main__ import conf_dir
from focus_exp.config import JOBS, Config
from focus_exp.config_attention import schema_of

CONF = Path(conf_dir())
CHOICES = sorted(
    f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml") if not path.stem.startswith("base_")
)


def help_on(*choices):
    result = run("--help", *choices)
    assert result.code == 0, result.err
    return result.out


def test_help_is_one_screen():
    lines = help_on().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    named = set(re.findall(r"[\w]+", "\n".join(lines)))
    assert {choice.partition("=")[2] for choice in CHOICES} <= named and not any("base_" in name for name in named)


# of each group one, the others of it are slow
FIRST = {choice.partition("=")[0]: choice for choice in reversed(CHOICES)}.values()


@pytest.mark.parametrize("choice", [pytest.param(c, marks=() if c in FIRST else pytest.mark.slow) for c in CHOICES])
def test_every_choice_has_a_page(choice):
    page = help_on(choice)
    head = (CONF / f"{choice.replace('=', '/')}.yaml").read_text().replace("# @package _global_\n", "")
    assert choice in page and head.splitlines()[0].removeprefix("# ") in page


@pytest.mark.parametrize("method", ["focus", "sparq", "full"])
def test_the_keys_of_a_choice_are_those_that_it_takes(method):
    named = set(re.findall(r"^  attention\.(\w+)=", help_on(f"attention={method}"), re.MULTILINE))
    assert named == {item.name for item in fields(schema_of(method))} - {"name"}


def test_a_key_stands_with_its_meaning_its_value_and_what_it_may_be():
    page = " ".join(help_on("attention=sparq").split())
    assert "attention.tokens_kept=32 k, tokens that a query attends to; null: the recent ones" in page
    assert "regime.phases.lora.learning_rate=" in help_on("regime=lora")
    assert {item.name for item in fields(Config) if item.name in ("seed", "arms")} <= set(
        re.findall(r"^  (\w+)=", help_on("job=train"), re.MULTILINE)
    )


def test_every_job_says_what_it_does_and_where_its_keys_are():
    for job in JOBS:
        assert help_on(f"job={job}").startswith(f"job={job}: ")
    assert "--help reproduce=embedded" in help_on("job=reproduce")


def test_a_launcher_has_a_page_with_its_comments_in_their_places():
    page = help_on("hydra/launcher=slurm").splitlines()
    limit = next(number for number, line in enumerate(page) if line.startswith("  timeout_min:"))
    assert page[limit - 1].startswith("  # ") and "It sets:" in page[:limit]


@pytest.mark.parametrize(("choice", "instead"), [("attention=spark", "sparq"), ("job=evaluation", "evaluate")])
def test_a_choice_that_there_is_not_is_one_error(choice, instead):
    result = run("--help", choice)
    assert result.code == 2 and instead in result.err and not result.out
