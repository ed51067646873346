"""Import contract between packages, and what an import may load."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "focus_exp").rglob("*.py"))
# a part imports those of earlier layers alone
LAYERS = [
    {"attention", "errors", "progress"},
    {"config", "launcher", "storage"},
    {"assets"},
    {"checks", "data", "models"},
    {"identity"},
    {"results"},
    {"cli", "reporting", "training"},
    {"budget", "fitting", "speed"},
    {"evaluation"},
    {"runs"},
    {"jobs"},
    {"__init__", "__main__"},
]


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
    layer_of = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    for path in FILES:
        part = part_of(path)
        used = {name.split(".")[1] for name in imports(path) if name.startswith("focus_exp.")} - {part}
        assert [name for name in used if layer_of[name] >= layer_of[part]] == [], path


def test_attention_imports_torch_triton_and_itself_alone():
    for path in FILES:
        if part_of(path) == "attention":
            packages = {name.split(".")[0] for name in imports(path)}
            assert packages <= {"torch", "triton", "ninja", "pydantic", "focus_exp"} | sys.stdlib_module_names, path


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


def test_callers_ask_methods_instead_of_knowing_them():
    """A method from elsewhere then has what those of the package have."""
    classes = re.compile(r"focus_exp\.attention\.(focus\.Focus|focus_dual\.FocusDual)")
    names = re.compile(r"\.has_router\b|\.has_groups\b|config\.(?:focus|dual)\b|isinstance\(.*(?:Focus|Dual)")
    for path in (path for path in FILES if part_of(path) not in ("attention", "fitting")):
        assert [name for name in imports(path) if classes.fullmatch(name)] == [], path
        assert names.findall(path.read_text(encoding="utf-8")) == [], path
