"""The README: its numbers are those of the committed records, its commands and its Python run."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from running import run
from transformers import AutoModelForCausalLM

from focus_exp.__main__ import conf_dir
from focus_exp.checks import parse
from focus_exp.config import register_schemas
from focus_exp.errors import UserError
from focus_exp.overrides import quote_override
from focus_exp.reporting.readme import readme, readme_of, write_readme

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "runs" / "records"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
TEMPLATE = (ROOT / "focus_exp" / "reporting" / "templates" / "README.md.j2").read_text(encoding="utf-8")
# names with digits in them, and what no run measures
NAMES = (
    *("GPT-2 124M", "PG-19", "SmolLM2-135M-Instruct", "135M", "4-bit", "arXiv 2604.03260", "95 %", "exit code 2"),
    *("Apache-2.0", "| base, full attention | 0 |", "| - | 1 |"),
)
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = [
    line.partition(" #")[0].strip()
    for kind, block in BLOCKS.findall(TEXT)
    if kind == "bash"
    for line in block.splitlines()
]


def block(kind):
    (found,) = (block for language, block in BLOCKS.findall(TEXT) if language == kind)
    return found


def test_the_readme_is_what_the_records_say_and_short():
    assert readme(RECORDS) == TEXT, "make readme"
    assert len(TEXT.splitlines()) <= 130


def test_no_number_of_the_readme_is_written_by_hand():
    prose = BLOCKS.sub("", re.sub(r"\{([{%#]).*?[}%#]\}", "", TEMPLATE, flags=re.DOTALL))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|Python 3\.\d+ to 3\.\d+", "", prose)
    for name in NAMES:
        prose = prose.replace(name, "")
    assert len(prose) > 1000 and re.findall(r".*\d.*", prose) == []


def test_a_readme_that_its_records_do_not_bear_out_is_refused(tmp_path):
    records = tmp_path / "runs" / "records"
    records.mkdir(parents=True)
    with pytest.raises(UserError, match=r"README.md.j2: no finished record has .*retrofit_124m"):
        readme(records)
    first = "compare", "decode", "frontier", "full_training", "leak", "long_context", "speed", "speed_methods"
    for experiment in first:
        shutil.copytree(RECORDS / experiment, records / experiment)
    for path in (RECORDS / "retrofit_124m").rglob("record.json"):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            row["delta_low"] = -0.01
        (records / path.parent.name).mkdir()
        (records / path.parent.name / "record.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="do not say any more that 'It drops most pairs, for a price'"):
        readme(records)


def test_no_other_readme_is_touched(tmp_path):
    records, page = tmp_path / "runs" / "records", tmp_path / "README.md"
    assert readme_of(RECORDS) == ROOT / "README.md" and readme_of(records) is None
    page.write_text("# Somebody's own project")
    write_readme(records)
    assert readme_of(records) is None and page.read_text() == "# Somebody's own project"


def test_the_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 8 and [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_can_be_given(command, tmp_path):
    program, *arguments = shlex.split(command.replace("<run folder>", str(tmp_path)))
    if program == "make":
        assert subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True).returncode == 0
        return
    module, arguments = arguments[:2], arguments[2:]
    assert (program, *module) == ("python", "-m", "focus_exp")
    if "--help" in arguments:
        assert run(*arguments).code == 0
        return
    register_schemas()
    sweep = "-m" in arguments
    overrides = [argument.partition(",")[0] if sweep else argument for argument in arguments if argument != "-m"]
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        assert parse(compose("config", list(map(quote_override, overrides)))).experiment


def test_the_python_runs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: tiny_model("gpt2"))
    known = {"ids": torch.arange(1, 40)[None]}
    exec(block("python").replace("window=128", "window=8").replace("max_new_tokens=100", "max_new_tokens=5"), known)
    saved = [path.name for path in (tmp_path / "my-adapter").iterdir()]
    assert "focus_adapter.safetensors" in saved
    assert len(block("python").strip().splitlines()) <= 10
