"""Words and docstring openings that pages, comments, strings and docstrings do not use."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    *(ROOT / name for name in ("README.md", "runs/records/report/report.md")),
    *(path for pattern in ("docs/*.md", "conf/**/*.yaml", "focus_exp/**/*.py") for path in sorted(ROOT.glob(pattern))),
]
WORDS = re.compile(
    r"\b(?:pairs (?:kept|removed)|(?:drops|keeps|removes) pairs|as many pairs|same sizes"
    r"|reads? the (?:future|past)|takes? over|hard groups|soft gates|groups a query (?:asks|reads|reaches)"
    r"|without a step|comes? to|stands? at|lies|lie in|anew|goes on|go on|went on|beside"
    r"|not told from|too little to decide|not engaged|not testable|hold together"
    r"|arms?|tries|regimes?|aims?|stretches|oracles?|twins?|worth|promises?|traps?|ledgers?"
    r"|fit_blocks|block_size|is to be had|likewise|what is there|of which there)\b",
    re.IGNORECASE,
)
ALLOWED = re.compile(r"best tokens \(oracle\)|base_block_size|pair_rule")
OPENINGS = re.compile(r"(?:The same|Likewise|Of|What|Whether|How|That|Where|Who|Which)\b")
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)  # and links


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of what a file says: of a module its strings and comments, of YAML its comments."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        lines = source.splitlines()
        yield from enumerate((line.partition("#")[2] for line in lines) if path.suffix == ".yaml" else lines, 1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_uses_standard_words(path):
    assert [(line, text) for line, text in prose(path) if WORDS.search(ALLOWED.sub(" ", CODE.sub(" ", text)))] == []


def test_docstrings_open_with_a_verb_or_noun():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in (ROOT / "focus_exp").rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
        assert [text for node in nodes if OPENINGS.match(text := ast.get_docstring(node) or "")] == [], path
