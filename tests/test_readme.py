"""README and docs: links exist, commands compose, Python runs. Numbers are checked in test_report."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from running import record_of, run, tiny, without_attention, write_texts

from focus_exp.checks import parse
from focus_exp.config import conf_dir, register_schemas
from focus_exp.models.methods import active_methods
from focus_exp.models.random import byte_tokenizer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
README = PAGES[0].read_text(encoding="utf-8")


def blocks(text, language):
    return [block for kind, block in BLOCKS.findall(text) if kind == language]


COMMANDS = [
    line.partition(" #")[0].strip()
    for page in (
        README,
        *((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("own_model.md", "at_scale.md")),
    )
    for block in blocks(page, "bash")
    for line in block.splitlines()
]


def headings(page):
    """The anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_and_anchors_exist(page):
    links = re.findall(r"\]\(([^):#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / name if name else page, anchor) for name, anchor in links if "://" not in anchor]
    assert [target for target, _ in targets if not target.exists()] == []
    assert [anchor for target, anchor in targets if anchor and anchor not in headings(target)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_page_command_composes(command, tmp_path):
    program, *arguments = shlex.split(command.replace("<run folder>", str(tmp_path)))
    if program == "make":
        assert subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True).returncode == 0
        return
    if program == "torchrun":
        program, arguments = "python", arguments[arguments.index("-m") :]
    module, arguments = arguments[:2], arguments[2:]
    assert (program, *module) == ("python", "-m", "focus_exp")
    if "--help" in arguments:
        assert run(*arguments).code == 0
        return
    register_schemas()
    sweep = "-m" in arguments
    overrides = [argument.partition(",")[0] if sweep else argument for argument in arguments if argument != "-m"]
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        assert parse(compose("config", overrides)).experiment


def test_adding_a_method_example_is_measured(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    (code,), (options,) = blocks(page, "python"), blocks(page, "yaml")
    (tmp_path / "parity_methods.py").write_text(code)  # another test has a my_methods
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "parity.yaml").write_text(options.replace("my_methods", "parity_methods"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = [*without_attention(tiny(tmp_path)), "+experiment=retrofit_124m"]
    result = run(*settings, "--config-dir", str(tmp_path), "attention=parity", "attention.window=8", "recipe=none")
    assert result.code == 0, result.err
    density = record_of(tmp_path).find("distant_density", "parity")
    assert density == pytest.approx(1 / 4, abs=0.05)


def test_readme_python_runs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOCUS_EXP_CACHE", str(tmp_path / "cache"))
    for part in (tiny_model("gpt2"), byte_tokenizer()):
        part.save_pretrained(tmp_path / "base")
    write_texts(tmp_path / "texts")
    (code,) = blocks(README, "python")
    code = re.sub('name = ".*"', 'name = "base"', code)
    small = "density=0.2, seq_len=64, window=8, groups=4, top_k=1, sequences=3, validation_sequences=1"
    code = code.replace("density=0.2", f"{small}, steps=8")
    known = {}
    exec(code.replace("[:500]", "[:40]").replace("max_new_tokens=50", "max_new_tokens=3"), known)
    assert (tmp_path / "my-adapter" / "focus_adapter.safetensors").exists()
    assert active_methods(known["model"])
