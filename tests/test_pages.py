"""Templates of pages: rows of tables, formats, and what is wrong with a template."""

import json

import pandas as pd
import pytest

from focus_exp.errors import UserError
from focus_exp.reporting.pages import PAGES, TEMPLATES, Tables, render, render_pages, wrap

ROW = {"id": "T1.2", "change": 3.264, "low": -1.04, "high": 4.0, "sparsity": 0.5549, "params": 278400, "seeds": 3}
CLAIMS = pd.DataFrame([ROW, ROW | {"id": "T1.3", "change": -0.04}])


@pytest.fixture
def fill(tmp_path):
    def fill(text):
        (tmp_path / "page.md.j2").write_text(text)
        return render(tmp_path / "page.md.j2", Tables({"claims": CLAIMS}, tmp_path))

    return fill


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("row('claims', id='T1.2').change | signed", "+3.3"),
        ("row('claims', id='T1.2', seeds=3).change | fixed(2)", "3.26"),
        ("row('claims', id='T1.3').change | signed", "-0.0"),
        ("row('claims', id='T1.2').sparsity | percent", "55.5"),
        ("row('claims', id='T1.2').params | fixed(0)", "278,400"),
        ("row('claims', id='T1.3').change | to_percent | fixed", "-3.9"),
        ("row('claims', id='T1.2') | interval", "+3.3 [-1.0, 4.0]"),
        ("row('claims', id='T1.2') | interval(' %')", "+3.3 % [-1.0, 4.0]"),
        ("rows('claims', seeds=3) | length", "2"),
        ("rows('claims', id='T9.9') | length", "0"),
        ("row('gpu', tokens=4096)['captured ratio'] | fixed", "2.0"),
    ],
)
def test_render_fills_in_cells(tmp_path, fill, expression, text):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "a.json").write_text(json.dumps({"rows": [{"tokens": 4096, "captured ratio": 2.04}]}))
    assert fill("{{ " + expression + " }} %") == f"{text} %"


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("row('claims', id='T9.9').change", "0 rows of claims"),
        ("row('claims', seeds=3).change", "2 rows of claims"),
        ("row('nowhere', id='T1.2')", "nowhere"),
        ("row('claims', name='T1.2')", "name"),
        ("row('claims', id='T1.2').speed", "speed"),
        ("row(", "unexpected"),
    ],
)
def test_render_refuses_what_is_not_in_the_tables(fill, expression, named):
    with pytest.raises(UserError, match=named) as raised:
        fill("{{ " + expression + " }}")
    assert "page.md.j2" in str(raised.value)


def test_render_pages_fills_in_templates_of_the_project(tmp_path):
    records = tmp_path / "runs" / "records"
    assert render_pages(records, {"claims": CLAIMS}) == {}
    (tmp_path / TEMPLATES).mkdir(parents=True)
    (tmp_path / TEMPLATES / "README.md.j2").write_text("# {{ row('claims', id='T1.2').seeds }} seeds\n")
    pages = render_pages(records, {"claims": CLAIMS})
    assert list(pages) == [tmp_path / PAGES["README.md.j2"]]
    assert pages[tmp_path / "README.md"].endswith("-->\n# 3 seeds\n")


def test_wrap_leaves_tables_headings_and_code():
    words = " ".join(["word"] * 40)
    kept = f"# {words}\n\n| {words} |\n\n```bash\n{words}\n\n{words}\n```\n"
    assert wrap(kept) == kept
    text = wrap(f"{words}\nlast\n\n- {words}\n  last\n1. first\n2. second\n")
    assert max(map(len, text.splitlines())) <= 120
    assert text.split("\n\n")[0].replace("\n", " ") == f"{words} last"
    assert text.split("\n\n")[1].replace("\n  ", " ") == f"- {words} last\n1. first\n2. second\n"
