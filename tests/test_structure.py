"""Import contract between packages, and the names allowed at the top level."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "focus_exp").rglob("*.py"))
TOP_LEVEL = {
    *("conf", "docs", "focus_exp", "runs", "tests", ".ci"),
    *("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", ".gitignore"),
}
FOUNDATION = {"errors", "storage", "progress", "assets", "config", "config_hash", "checks", "cli", "renames"}
MAY_IMPORT = {
    "attention": set(),
    "errors": set(),
    "storage": {"errors"},
    "progress": set(),
    "assets": FOUNDATION,
    "config": {"errors", "attention"},
    "config_hash": {"config"},
    "checks": {*FOUNDATION, "attention", "launcher"},
    "renames": set(),
    "cli": {*FOUNDATION, "attention"},
    "launcher": {"errors"},
    "results": FOUNDATION,
    "reporting": {*FOUNDATION, "results"},
    "data": FOUNDATION,
    "models": {*FOUNDATION, "attention"},
    "training": {*FOUNDATION, "attention", "models", "data", "results"},
    "evaluation": {*FOUNDATION, "attention", "models", "data", "results", "reporting", "training"},
    "speed": {*FOUNDATION, "attention", "models", "data", "results", "reporting", "training"},
    "jobs": {
        *FOUNDATION,
        "launcher",
        "attention",
        "models",
        "data",
        "results",
        "reporting",
        "training",
        "evaluation",
        "speed",
    },
    "__init__": {"errors", "models"},
    "__main__": {*FOUNDATION, "jobs", "launcher"},
}


def part_of(path: Path) -> str:
    """The package or module directly under focus_exp that a file belongs to."""
    return path.relative_to(ROOT / "focus_exp").parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every dotted name a file imports, wherever in the file, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_go_one_way():
    for path in FILES:
        own = part_of(path)
        used = {name.split(".")[1] for name in imports(path) if name.startswith("focus_exp.")}
        assert used <= MAY_IMPORT[own] | {own}, path


def test_attention_imports_torch_triton_and_itself_alone():
    for path in FILES:
        if part_of(path) == "attention":
            packages = {name.split(".")[0] for name in imports(path)}
            assert packages <= {"torch", "triton", "ninja", "focus_exp"} | sys.stdlib_module_names, path


def test_results_and_reporting_never_load_torch():
    paths = [path for path in FILES if part_of(path) in ("results", "reporting") and path.stem != "__init__"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert len(modules) > 10
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_wheel_has_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent.relative_to(ROOT) for path in FILES if path.name == "__init__.py"}
    packages = {".".join(folder.parts) for folder in folders}
    assert set(settings["tool"]["setuptools"]["packages"]) == {*packages, "focus_exp.conf"}


def test_top_level_holds_only_what_the_design_names():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name.split("/")[0] for name in listed.split("\0") if name}
    assert names <= TOP_LEVEL and {"conf", "focus_exp", "tests"} <= names
