"""The data files of the report: what they may say, and that all they say can be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from focus_exp.errors import UserError
from focus_exp.records.comparison import load_run
from focus_exp.reporting import specs
from focus_exp.reporting.tables import all_tables, table_of, table_specs

RECORDS = Path(__file__).parent.parent / "runs" / "records"
SPEC = {
    "lines": "record.rows", "title": "{{ title }}", "columns": {"name": "line.name"}, "notes": [],
    "values": "picked(line, 'name')",
}  # fmt: skip


def test_every_table_is_shown_of_every_committed_record():
    shown = set()
    for path in RECORDS.rglob("table.md"):
        made = all_tables(load_run(path.parent))
        shown |= {table.name for table in made}
        for table in made:
            assert table.rows and table.values and table.title, (path, table.name)
            assert {len(row) for row in table.rows} == {len(table.columns)}
    assert shown == set(table_specs())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"colums": {}}, "tables.yaml: one: colums: Unexpected keyword argument"),
        ({"title": 3}, "tables.yaml: one: title: Input should be a valid string"),
        ({"words": ["nme"]}, "tables.yaml: one: words: there is no column nme"),
        ({"columns": {"name": "line.name +"}}, "tables.yaml: one: 'line.name \\+' is no expression"),
        ({"columns": {"name": "share_of(line.name)"}}, "tables.yaml: one: 'share_of' is undefined"),
        ({"columns": {"name": "line.nme"}}, "tables.yaml: one: .* has no attribute 'nme'"),
        ({"notes": ["{% if %}"]}, "tables.yaml: one: '{% if %}' is no template"),
    ],
)
def test_a_wrong_spec_is_a_user_error(monkeypatch, wrong, message):
    monkeypatch.setattr(specs, "read_yaml", lambda name: {"one": SPEC | wrong})
    table_specs.cache_clear()
    try:
        with pytest.raises(UserError, match=message):
            table_of(load_run(next(RECORDS.rglob("table.md")).parent), "one")
    finally:
        table_specs.cache_clear()
