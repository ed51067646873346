"""Pages: numbers between markers, cells of Markdown tables, and what is wrong with a marker."""

from pathlib import Path

import pandas as pd
import pytest

from focus_exp.errors import UserError
from focus_exp.reporting.pages import fill, fill_pages

ROOT = Path(__file__).parent.parent
ROW = {"id": "T1.2", "model": "SmolLM2-135M-Instruct", "tokens": 4096, "change": 3.264, "sparsity": 0.5549}
TABLES = {"claims": pd.DataFrame([ROW, ROW | {"id": "T1.3", "change": -0.04}, ROW | {"id": "T1.4", "change": None}])}


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("claims id=T1.2 {change:+.1f}", "+3.3"),
        ("claims id=T1.3 tokens=4096 {change:+.1f}", "-0.0"),
        ("claims id=T1.2 model='SmolLM2 135M' {change:+.1f} ({sparsity:.1%})", "+3.3 (55.5 %)"),
        ("claims id=T1.2 {tokens:,.0f}", "4,096"),
        ("claims id=T1.2 {model}", "SmolLM2-135M-Instruct"),
        ("claims {count}", "3"),
        ("claims id=T9.9 {count}", "0"),
    ],
)
def test_fill_writes_cells(marker, text):
    assert fill(f"It is <!--= {marker} -->?<!--/--> so.", TABLES) == f"It is <!--= {marker} -->{text}<!--/--> so."


@pytest.mark.parametrize(
    ("marker", "named"),
    [
        ("claims id=T9.9 {change:.1f}", "0 rows"),
        ("claims tokens=4096 {change:.1f}", "3 rows"),
        ("claims id=T1.4 {change:.1f}", "could not convert"),
        ("nowhere id=T1.2 {change}", "nowhere"),
        ("claims name=T1.2 {change}", "name"),
        ("claims id=T1.2 {speed}", "speed"),
    ],
)
def test_fill_refuses_what_is_not_in_the_tables(marker, named):
    with pytest.raises(UserError, match=named) as raised:
        fill(f"<!--= {marker} -->1.0<!--/-->", TABLES)
    assert marker in str(raised.value)


def test_fill_writes_cells_of_a_table_by_its_labels():
    page = """<!--= claims tokens=4096 | id | {sparsity:.0%} | | model {change:+.1f} -->
| claim | pruned | note | SmolLM2 135M | Gemma 3 270M |
| --- | --- | --- | --- | --- |
| second `T1.2` ¹ | {} | by hand | {} | - |
| **T1.3** | {} | | {} | - |
<!--/-->"""
    filled = page
    for text in ("55 %", "+3.3", "55 %", "-0.0"):
        filled = filled.replace("{}", text, 1)
    assert fill(page.replace("{}", "?"), TABLES).replace("|  |", "| |") == filled
    with pytest.raises(UserError, match="0 rows"):
        fill(page.replace("{}", "?").replace("by hand | ? | -", "by hand | ? | ?"), TABLES)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "results.md"], ids=lambda page: page.name)
def test_page_has_no_line_that_opens_with_a_number(page):
    """CommonMark reads a line that opens with a comment as HTML."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("<!--") and not line.endswith("-->")] == []


def test_fill_pages_leaves_pages_outside_of_the_project_alone(tmp_path):
    (tmp_path / "README.md").write_text("<!--= claims {count} -->?<!--/-->")
    assert fill_pages(tmp_path / "project" / "runs", TABLES) == {}
