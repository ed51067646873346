"""Words and docstring openings that pages, comments, strings and docstrings do not use."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "focus_exp").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "runs" / "records" / "conclusions.md",
    ROOT / "runs" / "records" / "report" / "report.md",
]
YAML = sorted((ROOT / "conf").rglob("*.yaml"))
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


def prose(text):
    """Return the words of `text` that are neither code, links nor allowed names."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", text, flags=re.DOTALL)
    return ALLOWED.sub(" ", text)


def offences(text, place):
    return [f"{place}: {match[0]!r} in {text.strip()[:80]!r}" for match in WORDS.finditer(prose(text))]


def documented(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("page", [*PAGES, *YAML], ids=lambda path: str(path.relative_to(ROOT)))
def test_page_uses_standard_words(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    if page.suffix == ".yaml":
        lines = [line.partition("#")[2] for line in lines]
    assert [offence for number, line in enumerate(lines, 1) for offence in offences(line, number)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_uses_standard_words(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    strings = [
        offence
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        for offence in offences(node.value, node.lineno)
    ]
    comments = [
        offence
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        for offence in offences(token.string, token.start[0])
    ]
    assert strings + comments == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_open_with_a_verb_or_noun_and_are_short(path):
    first_lines = [
        (node.lineno if hasattr(node, "lineno") else 1, docstring.splitlines()[0])
        for node in documented(ast.parse(path.read_text(encoding="utf-8")))
        if (docstring := ast.get_docstring(node))
    ]
    assert [line for line in first_lines if OPENINGS.match(line[1])] == []
