"""The page of a run and the list of all runs: of runs that go on, ended, failed, were killed, are broken."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import only_run, record_of, router_steps, run, tiny

from focus_exp.jobs import run as job
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.reporting.run_index import index, write_pages
from focus_exp.reporting.run_page import PAGE, run_page, write_run_page
from focus_exp.results.run_dir import NOT_ENDED, lock_of
from focus_exp.storage import held
from focus_exp.training.module import LanguageModelTask

VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """Elements that are closed in order, the addresses that a browser would fetch or follow, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.said = ""
        self.metas: list[dict[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.addresses += [values[name] for name in ("src", "href") if name in values]
        if tag == "meta":
            self.metas.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.said += data

    @property
    def live(self) -> bool:
        return any(meta.get("http-equiv") == "refresh" for meta in self.metas)


def opened(path: Path) -> Page:
    """A page on disk, all of whose links lead to something that is there, and none out of the disk."""
    page = Page(path.read_text(encoding="utf-8"))
    for address in page.addresses:
        assert not re.match(r"\w+:|//", address) or address == "data:,"
        if not address.startswith(("#", "data:")):
            assert (path.parent / unquote(address)).exists(), address
    return page


def record_in(folder: Path, **fields) -> Record:
    known = {"status": "finished", "experiment": "test", "started": "2026-01-01T00:00:00+00:00", "seed": 0}
    record = Record(**known | {"command": "python -m focus_exp seed=0", "device": "cpu"} | fields)
    folder.mkdir(parents=True, exist_ok=True)
    record.save(folder / "record.json")
    return record


def log(folder: Path, steps: int, torn: str = "") -> None:
    lines = [{"phase": "router", "step": step, "loss": 5.0 - step / 10} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def test_a_finished_run_shows_what_it_found_and_how_to_repeat_it(tmp_path, monkeypatch):
    seen = []
    step = LanguageModelTask.training_step

    def looking(self, batch, number):
        if self.global_step == 3:
            (page,) = (tmp_path / "runs").rglob(f"seed*/{PAGE}")
            seen.append((opened(page), opened(tmp_path / "runs" / PAGE)))
        return step(self, batch, number)

    monkeypatch.setattr(LanguageModelTask, "training_step", looking)
    monkeypatch.setattr(job, "LEAST", 0.0)
    monkeypatch.setattr(job, "RATIO", 0)
    result = run(*tiny(tmp_path), router_steps(4), "eval.controls=false")
    assert result.code == 0, result.err
    folder, record = only_run(tmp_path), record_of(tmp_path)
    assert result.out.splitlines()[-1] == f"page: {folder / PAGE}"
    page, listed = opened(folder / PAGE), opened(tmp_path / "runs" / PAGE)
    assert "finished" in page.said and record.command in page.said and not page.live
    assert all(finding in page.said for finding in job.all_findings(record))
    assert {"figures/loss_curve.svg", "record.json", "adapter/", "table.md"} <= set(page.addresses)
    assert "finished" in listed.said and folder.name in listed.said and not listed.live
    # as it was after three of the four steps
    during, list_then = seen[0]
    assert during.live and "running" in during.said and "step 3 of 4" in during.said
    assert "figures/loss_curve.svg" in during.addresses
    assert list_then.live and "running" in list_then.said


def test_a_failed_run_says_why(tmp_path):
    assert run(*tiny(tmp_path), "data.files=nowhere").code == 2
    page, listed = opened(only_run(tmp_path) / PAGE), opened(tmp_path / "runs" / PAGE)
    for shown in (page, listed):
        assert "failed" in shown.said and "data.files=nowhere" in shown.said and not shown.live


def test_a_page_that_cannot_be_made_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def broken(*arguments):
        raise ValueError("no page today")

    monkeypatch.setattr(job, "write_run_page", broken)
    assert run(*tiny(tmp_path), router_steps(1), "eval.controls=false").code == 0
    assert "no page today" in caplog.text


def test_a_killed_run_is_told_from_one_that_goes_on_by_its_lock(tmp_path):
    folder = tmp_path / "test" / "model" / "seed=0"
    record = record_in(folder, status="interrupted", error=NOT_ENDED)
    log(folder, 5, torn='{"phase": "rou')
    with held(lock_of(folder), "the run"):
        write_run_page(record, folder, tmp_path, "step 5 of 9, 12 s of training left")
        write_pages(tmp_path)  # leaves the page to the run
        live = opened(folder / PAGE)
        assert live.live and "running" in live.said and "12 s of training left" in live.said
        assert "figures/loss_curve.svg" in live.addresses and opened(tmp_path / PAGE).live
    write_pages(tmp_path)
    page, listed = opened(folder / PAGE), opened(tmp_path / PAGE)
    for shown in (page, listed):
        assert "interrupted" in shown.said and "it was killed" in shown.said and not shown.live


def test_a_comparison_that_goes_on_shows_each_arm_with_its_state(tmp_path):
    folder = tmp_path / "test" / "compare" / "seed=0"
    states = {"done": ("finished", None), "lost": ("failed", "no such text"), "going": ("interrupted", NOT_ENDED)}
    for name, (status, error) in states.items():
        record_in(tmp_path / "test" / name / "seed=0", status=status, error=error, config={"arm": name})
    unknown = {"settings": ["a=b"], "status": "interrupted", "error": NOT_ENDED}
    arms = [Arm(name=name, folder=f"runs/test/{name}/seed=0", **unknown) for name in (*states, "later")]
    record = record_in(folder, status="interrupted", error=NOT_ENDED, arms=arms)
    with held(lock_of(tmp_path / "test" / "going" / "seed=0"), "the arm"):
        said = Page(run_page(record, folder, tmp_path, "arm 3 of 4: going")).said
    for name, state in {"done": "finished", "lost": "failed", "going": "running", "later": "waiting"}.items():
        assert re.search(rf"{name}\s*{state}", said), name
    assert "no such text" in said and "arm 3 of 4: going" in said


def test_a_broken_record_is_a_line_of_the_list(tmp_path):
    good, bad = tmp_path / "test" / "good", tmp_path / "test" / "bad"
    row = Row(name="hard", kind="hard", method="focus", causal=True, nll=1.0, perplexity=2.75, pairs_removed=0.75)
    record_in(good, rows=[row], config={"attention": {"method": "focus"}})
    record_in(bad)
    (bad / "record.json").write_text((bad / "record.json").read_text()[:99])
    write_pages(tmp_path)
    listed = opened(tmp_path / PAGE)
    assert "broken" in listed.said and "not a readable record" in listed.said
    assert "2.75" in listed.said and "25.0 %" in listed.said


def test_committed_records_have_a_report_of_their_own(tmp_path):
    record_in(tmp_path / "records" / "test" / "seed=0")
    (tmp_path / "records" / "report").mkdir()
    (tmp_path / "records" / "report" / "report.html").write_text("")
    assert "0 runs" in Page(index(tmp_path)).said and "records/report/report.html" in Page(index(tmp_path)).addresses


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"onload="x', "seed=0#part?x=1 %41&amp;"])
def test_names_stay_names(tmp_path, name):
    folder = tmp_path / "test" / name.replace("/", "_")
    record = record_in(folder, experiment=name, error=name, status="failed", command=f"focus_exp experiment={name}")
    (folder / f"{name.replace('/', '_')}.txt").write_text("")
    write_run_page(record, folder, tmp_path)
    write_pages(tmp_path)
    page, listed = opened(folder / PAGE), opened(tmp_path / PAGE)
    assert name in page.said and name in listed.said


@settings(max_examples=30)
@given(reason=st.text(max_size=60))
def test_any_reason_is_text(tmp_path_factory, reason):
    folder = tmp_path_factory.getbasetemp() / "any"
    record = replace(record_in(folder), status="failed", error=reason)
    page = Page(run_page(record, folder, folder))
    assert reason in page.said
