"""The report of the committed runs: its form; test_records.py compares its numbers with the committed ones."""

import pandas as pd
import pytest

from focus_exp.reporting.claims import evaluate_claims
from focus_exp.reporting.format import to_latex, to_markdown
from focus_exp.reporting.frame import Row, read_yaml, to_frame
from focus_exp.reporting.load import Results, load_results
from focus_exp.reporting.paper_specs import paper_rows
from focus_exp.reporting.report import report_tables, write_report
from focus_exp.reporting.tables import break_even, speed


@pytest.fixture(scope="module")
def content(published):
    return report_tables(published)


def test_claims_paper_ratios_are_printed_in_the_paper():
    printed = {cell for name in read_yaml("paper") for row in paper_rows(name) for cell in row.values()}
    for entry in read_yaml("claims"):
        assert set(entry.get("below", {}).get("paper_ratio", [])) <= printed, entry["id"]


def test_format_tables_escape_markup():
    table = pd.DataFrame({"a|b": ["1 % & <x>"]})
    assert to_markdown(table) == "| a\\|b |\n| --- |\n| 1 % & <x> |\n"
    assert r"1 \% \& <x>" in to_latex(table, "caption")


def test_write_report_writes_all_formats_and_figures(published, content, tmp_path):
    write_report(published, content, tmp_path)
    assert (tmp_path / "report.md").exists()
    assert (tmp_path / "report.tex").read_text().count(r"\begin{longtable}") > 15
    assert len(content["claims"]) == len(pd.read_csv(tmp_path / "claims.csv")) == 41
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == {"frontier", "figure1", "speed", "passage", "passage_paper"}


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 2.0), (2, 3.0)], 1),
        ([(1, 0.5), (4, 2.0)], 2),
        ([(1, 2.0), (2, 0.5)], None),
        ([(1, 0.5), (2, 1.0), (4, 0.25), (16, 4.0)], 8),
    ],
)
def test_break_even_interpolates_in_log_length(points, expected):
    assert break_even(points) == (expected if expected is None else pytest.approx(expected))


def test_speed_table_of_a_first_run_names_its_method():
    cells = {"source": "speed", "metric": "speedup", "status": "finished", "run": "first", "clock": "attention"}
    rows = [Row(**cells, groups=4, tokens=tokens, value=tokens / 2048, density=0.5) for tokens in (1024, 4096)]
    table = speed(Results(pd.DataFrame(), to_frame(rows)))
    assert table.method.tolist() == ["focus", "focus"] and table.break_even.tolist() == [2048, 2048]


def test_evaluate_claims_without_runs_is_not_run(tmp_path):
    claims = evaluate_claims(load_results(tmp_path))
    assert set(claims.verdict) == {"not run", "out of scope"}
    assert claims[claims.verdict == "out of scope"].id.tolist() == ["T6.3", "T6.4", "T4.2"]
