"""findings.yaml: whatever it says can be said, and of every committed record something is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from focus_exp.errors import UserError
from focus_exp.records.comparison import load_run
from focus_exp.reporting import sentences, specs
from focus_exp.reporting.findings import MOST_GROUPS, all_findings

REPORTING = Path(sentences.__file__).parent
RECORDS = REPORTING.parent.parent / "runs" / "records"


@pytest.fixture
def entries(monkeypatch):
    """Puts other entries into the place of the file's."""

    def replace(content):
        monkeypatch.setattr(specs, "read_yaml", lambda name: content)
        sentences.entries.cache_clear()

    yield replace
    monkeypatch.undo()
    sentences.entries.cache_clear()


def test_every_committed_record_has_its_findings():
    for path in RECORDS.rglob("table.md"):
        said = all_findings(load_run(path.parent))
        assert said and all(line.endswith(".") and "  " not in line and line == line.strip() for line in said), path
        assert not any(" on 0 tokens" in line for line in said), path


def test_of_many_groups_the_purest_are_described():
    record = load_run(next((RECORDS / "groups").rglob("record.json")).parent)
    groups = record.groups.closest.groups
    names = [group.name for group in groups]
    assert len(names) == MOST_GROUPS and described(record) == ("", names)
    last = min(groups, key=lambda group: group.purity)
    groups.append(replace(last, name="Z", purity=1.0))
    names.remove(last.name)
    assert described(record) == (f"the purest of its {MOST_GROUPS + 1} groups", [*names, "Z"])


def described(record):
    """How a record's groups that are closest to word classes are introduced, and their names."""
    said = next(line for line in all_findings(record) if line.startswith("Closest to word classes"))
    head, groups = said.split(": ")
    _, the, chosen = head.partition("the purest")
    return the + chosen, [group.split()[0] for group in groups.split(", ")]


def test_every_sentence_is_asked_for_and_every_rule_can_be_read():
    code = "".join((REPORTING / name).read_text() for name in ("findings.yaml", *_modules()))
    for name, entry in sentences.entries().items():
        assert re.search(rf"""["']{name}["']""", code), f"nobody says {name}"
        for rule in [sentences.Rule(entry)] if isinstance(entry, str) else entry:
            assert sentences._template(rule.say) and specs.expression(rule.when)


def _modules():
    return [path.name for path in REPORTING.glob("*findings.py")]


def test_a_rule_is_said_where_it_is_true_and_a_fact_that_is_missing_is_an_error(entries):
    entries(
        {"size": [{"when": "n > 1", "say": "{{ n }} of them."}, {"say": "{{ n }} in all."}], "one": "{{ missing }}"}
    )
    assert list(sentences.tell("size", n=2)) == ["2 of them.", "2 in all."]
    assert list(sentences.tell("size", n=1)) == ["1 in all."]
    with pytest.raises(UndefinedError, match="missing"):
        sentences.say("one", n=1)
    with pytest.raises(UndefinedError, match="'n' is undefined"):
        list(sentences.tell("size"))


@pytest.mark.parametrize("wrong", [{"whenever": "true", "say": "so"}, {"when": "true"}, {"say": 3}])
def test_a_wrong_rule_is_a_user_error(entries, wrong):
    entries({"size": [wrong]})
    with pytest.raises(UserError, match=r"findings.yaml: size"):
        list(sentences.tell("size"))
