"""job=report: every record in one report, every claim with a verdict that follows from the numbers."""

import csv
import html.parser
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from running import run, tiny
from test_compare import compared, comparison_of, row, settings

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting.claims import claim_table, claims, judged, judged_runs, verdicts_table
from focus_exp.reporting.findings import all_findings
from focus_exp.reporting.formats import (
    NOT_ENGAGED,
    NOT_HERE,
    NOT_REPRODUCED,
    NOT_RUN,
    OTHER_METHOD,
    RAN,
    REPRODUCED,
    SAME_DIRECTION,
    UNDECIDED,
    VERDICTS,
)
from focus_exp.reporting.gather import Runs, gather
from focus_exp.reporting.pages import Section, latex_document, latex_text, markdown, page
from focus_exp.reporting.table import Table
from focus_exp.reporting.whole_report import write_report_of

RECORDS = Path(__file__).parent.parent / "runs" / "records"


def verdicts(*records):
    """(table, claim) -> verdict."""
    return {(claim.table, claim.says): verdict for claim, verdict in judged(list(records))}


def find(found, table, words):
    (verdict,) = [verdict for (t, says), verdict in found.items() if t == table and words in says]
    return verdict


def compare(*rows, benchmarks=()):
    return replace(comparison_of(*rows, benchmarks=benchmarks), experiment="compare")


def benchmark(arm, difference, removed=0.5, kind="hard", task="hellaswag"):
    return BenchmarkRow(
        attention=arm, kind=kind, task=task, metric="acc" if "lambada" in task else "acc_norm",
        value=0.3, n=20, pairs_removed=removed,
        difference=difference, difference_low=difference - 0.1, difference_high=difference + 0.1,
    )  # fmt: skip


def test_without_records_nothing_is_claimed():
    found = [verdict.word for _, verdict in judged([])]
    assert set(found) == {NOT_RUN} and len(found) == len(claims()) > 15
    failed = Record(status="failed", experiment="compare")
    assert [verdict.word for _, verdict in judged([failed])] == found


@pytest.mark.parametrize(
    ("low", "delta", "high", "causal", "word"),
    [
        (-0.3, -0.2, -0.1, True, REPRODUCED),
        (-0.12, -0.1, -0.08, True, SAME_DIRECTION),
        (0.1, 0.2, 0.3, True, NOT_REPRODUCED),
        (-0.1, 0.0, 0.1, True, UNDECIDED),
        # who reads the future has an advantage, and may lose all the same
        (-0.3, -0.2, -0.1, False, NOT_HERE),
        (0.1, 0.2, 0.3, False, NOT_REPRODUCED),
    ],
)
def test_a_lower_perplexity_counts_where_its_interval_and_its_causality_allow(low, delta, high, causal, word):
    hard = Row(
        name="Focus hard k=1", kind="hard", method="focus", causal=causal, top_k=1, nll=3.0 + delta, perplexity=20.0,
        delta_nll=delta, delta_low=low, delta_high=high,
    )  # fmt: skip
    base = Row(name="base", kind="base", method="full", causal=True, nll=3.0, perplexity=20.1)
    config = {"attention": {"method": "focus", "top_k": 1, "groups": 4}}
    record = Record(status="finished", experiment="leak", rows=[base, hard], config=config, seed=0)
    assert find(verdicts(record), "T1", "lowers the perplexity").word == word
    turned = replace(hard, delta_nll=-delta or 1, delta_low=-high, delta_high=-low)
    other = replace(record, rows=[base, turned], seed=1)
    assert find(verdicts(record, other), "T1", "lowers the perplexity").word == (UNDECIDED if causal else NOT_HERE)
    own = find(verdicts(replace(record, experiment="retrofit_124m")), "T1", "reads the past alone")
    assert own.word == (OTHER_METHOD if causal else NOT_RUN) and (not causal or f"under it: {word}" in own.why)


@pytest.mark.parametrize(
    ("scores", "word"),
    [
        ([benchmark("focus", 0.0, removed=0.01)], NOT_ENGAGED),
        ([benchmark("focus", -0.3)], NOT_REPRODUCED),
        ([benchmark("focus", 0.0)], UNDECIDED),
        ([], NOT_RUN),
    ],
)
def test_equal_scores_count_only_where_the_mask_acted(scores, word):
    found = verdicts(compare(row("focus", kind="hard"), benchmarks=scores))
    assert find(found, "T1", "stay as they are").word == word


@pytest.mark.parametrize(("tasks", "words"), [(1, (NOT_REPRODUCED, REPRODUCED)), (4, (UNDECIDED, UNDECIDED))])
def test_the_worst_of_several_scores_is_judged_as_such(tasks, words):
    # -11 points +- 10: beyond its own interval, not beyond those that hold for four together
    names = ["hellaswag", "arc_easy", "piqa", "lambada_openai"][:tasks]
    differences = [-0.11, 0.0, 0.0, 0.0]
    scores = [
        benchmark(arm, by, kind=kind, task=task, removed=0.5 if arm == "focus" else 0.0)
        for arm, kind in (("focus", "hard"), ("lora", "trained"))
        for task, by in zip(names, differences, strict=False)
    ]
    lora = row("lora", kind="trained", **compared(-0.1))
    found = verdicts(compare(row("focus", kind="hard"), lora, benchmarks=scores))
    assert (find(found, "T1", "stay as they are").word, find(found, "T3", "loses on benchmarks").word) == words


def test_rivals_are_judged_by_their_paired_differences():
    lora = row("lora", kind="trained", nll=2.9, **compared(-0.1, half=0.03))
    found = verdicts(
        compare(
            row("focus", kind="hard"),
            lora,
            row("longformer", **compared(0.08)),
            row("performer", **compared(-0.2)),
            row("routing_transformer", causal=False, **compared(-0.5)),
            row("sparq", **compared(0.0)),
            benchmarks=[benchmark("lora", -0.3, removed=0.0, kind="trained")],
        )
    )
    assert find(found, "T1", "than longformer").word == REPRODUCED
    assert find(found, "T1", "than performer").word == NOT_REPRODUCED
    routing = find(found, "T1", "than routing_transformer")
    assert routing.word == NOT_HERE and "reads the future" in routing.why
    assert find(found, "T10", "than sparq with").word == UNDECIDED
    assert find(found, "T10", "magicpig").word == NOT_RUN
    assert find(found, "T3", "lower perplexity").word == REPRODUCED
    assert find(found, "T3", "loses on benchmarks").word == REPRODUCED


def timed(tokens, ratio, groups=8, top_k=1, assignment="balanced"):
    return SpeedRow(
        clock="attention", tokens=tokens, groups=groups, assignment=assignment, top_k=top_k, pairs_kept=0.2,
        full_seconds=ratio, focus_seconds=1.0,
    )  # fmt: skip


def test_speed_is_judged_at_the_printed_lengths():
    fast = [timed(2**10, 0.8), timed(2**12, 2.0), timed(2**14, 4.7), timed(2**15, 6.1), timed(2**16, 6.9)]
    found = judged([Record(status="finished", experiment="speed", device="cpu", speed=fast[1:])])
    short = next(verdict for claim, verdict in found if claim.paper.startswith("K = 8"))
    assert (short.word, short.needs) == (UNDECIDED, "timings at 1,024 tokens")
    found = judged([Record(status="finished", experiment="speed", device="cpu", speed=fast)])
    words = [(claim.paper, verdict.word) for claim, verdict in found if claim.table == "T6"]
    assert words == [
        ("K = 4: 3.0x on an H100", NOT_RUN), ("K = 8: 4.7x on an H100", SAME_DIRECTION),
        ("K = 4: 4.1x on an H100", NOT_HERE), ("K = 8: 8.6x on an H100", NOT_HERE),
    ]  # fmt: skip
    slow = [*fast[:-1], timed(65_536, 4.0), timed(2**20, 8.5)]
    found = judged([Record(status="finished", experiment="speed", device="gpu", speed=slow)])
    words = [verdict.word for claim, verdict in found if claim.table == "T6" and claim.paper.startswith("K = 8")]
    assert words == [SAME_DIRECTION, REPRODUCED]
    by_k = [timed(8192, 2.1, 4), timed(65_536, 4.1, 4), timed(65_536, 1.1, 4, 2), timed(8192, 0.9, 4, 3)]
    found = judged([Record(status="finished", experiment="speed_quality", device="gpu", speed=by_k)])
    assert [v.word for c, v in found if c.table == "T7"] == [REPRODUCED, SAME_DIRECTION, UNDECIDED]
    again = Record(status="finished", experiment="speed", device="gpu", speed=[timed(65_536, 3.5, 4)])
    found = judged([again, Record(status="finished", experiment="speed_quality", device="gpu", speed=by_k)])
    assert next(v.word for c, v in found if c.table == "T7") == UNDECIDED


def test_seeds_of_several_experiments_are_a_second_level_of_one_interval():
    def at(seed, delta, experiment="seeds"):
        found = compare(row("focus", kind="hard"), row("longformer", **compared(delta)))
        return replace(found, experiment=experiment, seed=seed)

    agreed = find(verdicts(at(0, 0.2, "compare"), at(1, 0.3), at(2, 0.25)), "T1", "than longformer")
    assert agreed.word == SAME_DIRECTION and [record.seed for record in agreed.records] == [0, 1, 2]
    assert agreed.numbers["value"] == pytest.approx(-0.25)
    width = (agreed.numbers["high"] - agreed.numbers["low"]) / 2
    assert 4.3 * 0.05 / 3**0.5 > width > 1.96 * 0.05 / 3**0.5 > 0.01  # of the text alone
    split = find(verdicts(at(0, 0.2, "compare"), at(1, 0.02)), "T1", "than longformer")
    assert split.word == UNDECIDED and "seeds for 7.5 %" in split.needs


def test_records_at_scale_quick_stand_alone(tmp_path):
    for number, scale in enumerate(("embedded", "quick")):
        record = replace(comparison_of(row("longformer", kind="trained")), experiment=scale)
        record.config = record.config | {"scale": {"name": scale}}
        (tmp_path / str(number)).mkdir()
        record.save(tmp_path / str(number) / "record.json")
    assert [record.experiment for record in gather(tmp_path).records] == ["embedded"]
    assert [record.experiment for record in gather(tmp_path, "paper").records] == ["embedded"]
    assert [record.experiment for record in gather(tmp_path, "quick").records] == ["quick"]


def test_scale_quick_has_no_verdict():
    found = comparison_of(row("focus", kind="hard"), row("longformer", kind="trained", **compared(0.2)))
    quick = replace(found, config=found.config | {"scale": {"name": "quick"}})
    for record, said in ((found, SAME_DIRECTION), (quick, RAN)):
        runs = Runs([(Path("run"), replace(record, experiment="compare"))])
        ledger = claim_table(judged_runs(runs), runs)
        (line,) = [line for line in ledger.values if "than longformer" in line["the paper says"]]
        assert line["verdict"] == said
        assert (line["value"], line["unit"]) == (-0.2, "nats") and line["low"] < -0.2 < line["high"] < 0
    assert ledger.notes[0].startswith(f"1 {RAN}, ")
    assert "no number of it means anything" in verdicts_table(judged_runs(runs)).rows[0][2]


def under_it(verdict):
    """What is said of another method, and what its numbers would be."""
    assert verdict.word == OTHER_METHOD
    return re.search(r"the router of .*?under it: [^;]*", verdict.why)[0]


def test_claims_on_other_sizes():
    at_most = find(verdicts(), "T2", "cost no model more")
    assert at_most.word == NOT_RUN and "experiment=model_scale" in at_most.why

    def scaled(delta, rule="share", groups=4):
        bounds = {"delta_low": delta - 0.01, "delta_high": delta + 0.01}
        part = row("small", kind="hard", pair_rule=rule, top_k=2, delta_nll=delta, **bounds)
        found = comparison_of(part)
        found.config["attention"]["groups"] = groups
        return find(verdicts(replace(found, experiment="model_scale")), "T2", "cost no model more")

    for delta, word in ((0.02, REPRODUCED), (0.085, UNDECIDED), (0.3, NOT_REPRODUCED)):
        assert under_it(scaled(delta)) == f"the router of this project; under it: {word}"
    assert "nothing here has pair_rule share; under it" in scaled(0.02, "query_topk").why
    assert scaled(0.02, groups=8).word == NOT_RUN

    def twins(delta):
        found = comparison_of(row("full", kind="trained"), row("focus", kind="hard", **compared(delta, half=0.005)))
        return find(verdicts(replace(found, experiment="from_scratch")), "T5", "from scratch Focus").word

    words = {-0.05: SAME_DIRECTION, -0.005: REPRODUCED, 0.012: UNDECIDED, 0.05: NOT_REPRODUCED}
    assert {delta: twins(delta) for delta in words} == words


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_latex_compiles(tmp_path):
    hard = Table(
        columns=["a_b"] * 20, rows=[["ſ ☃ \\ {x} → “quoted” a/b_c=d"] * 20], title="50 % {of} #1", notes=["~^"]
    )
    (tmp_path / "report.tex").write_text(latex_document([Section("part", "§ 1 & 2", [hard, hard])]), encoding="utf-8")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "report.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0 and (tmp_path / "report.pdf").exists(), done.stdout[-2000:]


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOOK = """<script>addEventListener('load', () => {
  const seen = [...document.images].filter(image => image.naturalWidth > 100).length
  const parts = [...document.querySelectorAll('section, table')]
  const shown = parts.filter(part => part.offsetHeight > 0).length
  document.title = `${seen} of ${document.images.length}, ${shown}, ${parts.length}`
})</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [1600, 500])
def test_a_browser_shows_every_table_and_figure(tmp_path, width):
    write_report_of(RECORDS, tmp_path)
    path = tmp_path / "report.html"
    path.write_text(path.read_text().replace(' loading="lazy"', "").replace("</body>", f"{LOOK}</body>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    # its profile anywhere but at home
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\d+) of (\d+), (\d+), (\d+)</title>", done.stdout)
    assert found, done.stderr
    seen, images, shown, parts = map(int, found.groups())
    assert seen == images > 10 and shown == parts > 40
    assert "CONSOLE" not in done.stderr


class Tags(html.parser.HTMLParser):
    """Every tag that opens is closed; what the page loads."""

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.anchors = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        self.anchors |= {value for name, value in attrs if name == "id"}
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_holds_every_record_and_opens_without_a_network(tmp_path):
    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    for twin in tmp_path.rglob("*.png"):  # as in what is published
        twin.unlink()
    result = run(*tiny(tmp_path), "job=report")
    assert result.code == 0, result.err
    folder = tmp_path / "runs" / "report"
    ((place, record),) = gather(tmp_path / "runs").found
    text = (folder / "report.md").read_text()
    assert place.relative_to(tmp_path / "runs").as_posix() in text and all(
        line in text for line in all_findings(record)
    )
    tags = Tags()
    tags.feed((folder / "report.html").read_text())
    assert not tags.open and tags.sources
    links = {source.removeprefix("#") for source in tags.sources if source.startswith("#")}
    assert len(links) > 15 and links <= tags.anchors
    figures = [source for source in tags.sources if not source.startswith("#")]
    assert any(source.endswith(".svg") for source in figures)
    assert all((folder / source).is_file() for source in figures)
    claimed = list(csv.DictReader((folder / "claims.csv").open()))
    assert {line["verdict"] for line in claimed} <= set(VERDICTS)
    assert "not run" in result.out and (folder / "report.tex").read_text().count(r"\begin{longtable}") > 1


def test_a_copied_record_counts_once_and_the_copy_is_named(tmp_path):
    runs = tmp_path / "runs"
    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    ((place, record),) = gather(runs).found
    record.save(runs / "records" / "kept" / "record.json")
    ((kept, _),) = gather(runs).found
    assert kept == runs / "records" / "kept" != place


def test_arms_are_in_the_record_of_their_comparison(tmp_path):
    assert run(*settings(tmp_path)).code == 0
    assert [record.config["job"] for _, record in gather(tmp_path / "runs").found] == ["compare"]


def test_an_empty_folder_is_one_message(tmp_path):
    result = run("job=report", f"runs_dir={tmp_path}")
    assert result.code == 2 and "no record.json" in result.err


def test_cells_are_escaped():
    table = Table(columns=["a_b"], rows=[["<5 % & $x$ ± 1 →"]], title="50 % {of}", notes=["<note>"])
    assert latex_text("5 % & $ _") == r"5 \% \& \$ \_"
    assert r"<5 \% \& \$x\$ $\pm$ 1 $\to$ \\" in latex_document([Section("part", "title", [table])])
    shown = page([Section("part", "<title>", [table])], Path())
    assert (
        "&lt;title&gt;" in shown
        and "&lt;5 % &amp; $x$ ± 1 →" in shown
        and "&lt;note&gt;" in shown
        and not re.search("https?://", shown)
    )


def test_a_verdict_says_nothing_twice():
    for _, verdict in judged(gather(RECORDS).records):
        sentences = verdict.why.split("; ")
        assert len(sentences) == len(set(sentences)), verdict.why


@pytest.mark.parametrize(
    ("delta", "word"), [(0.0, REPRODUCED), (0.05, REPRODUCED), (-0.05, NOT_REPRODUCED), (-0.012, UNDECIDED)]
)
def test_as_good_as_is_not_better_by_more_than_a_margin(delta, word):
    found = comparison_of(row("d_16", kind="hard"), row("d_768", kind="hard", **compared(delta, half=0.005)))
    own = find(verdicts(replace(found, experiment="routing_dim")), "d_g", "16 dimensions")
    assert own.word == OTHER_METHOD and f"under it: {word}" in own.why
    trained = comparison_of(row("focus", kind="hard"), row("full", kind="trained", **compared(-delta)))
    words = {0.0: UNDECIDED, 0.05: NOT_REPRODUCED, -0.05: SAME_DIRECTION, -0.012: SAME_DIRECTION}
    assert (
        find(verdicts(replace(trained, experiment="full_training")), "T5", "with everything trained").word
        == words[delta]
    )


def test_the_longest_texts_decide_and_without_an_interval_nothing_is_decided():
    def at(tokens, difference, arm="k_2_share"):
        half = None if difference is None else 0.01
        return BenchmarkRow(
            attention=arm, kind="hard", task=f"perplexity@{tokens}", metric="perplexity", value=9.0, n=16,
            requests=16, pairs_removed=0.5, difference=difference, difference_low=half and difference - half,
            difference_high=half and difference + half,
        )  # fmt: skip

    def word(*rows):
        arms = [row(arm, kind="hard") for arm in ("k_2", "k_2_share")]
        found = replace(comparison_of(*arms, benchmarks=rows), experiment="long_context")
        return under_it(find(verdicts(found), "long", "cost little"))

    ours = "the router of this project; under it: "
    assert word(at(8192, 0.02), at(1024, 0.9)) == ours + REPRODUCED
    assert word(at(4096, 0.02), at(8192, 0.2)) == ours + NOT_REPRODUCED
    assert word(at(4096, 0.02), at(8192, None)) == ours + UNDECIDED
    # the paper's number is of its own rule
    assert "nothing here has arm k_2_share" in word(at(8192, 0.02, "k_2"))
    assert word(at(8192, 0.9, "k_2"), at(8192, 0.02)) == ours + REPRODUCED


def test_a_cell_is_shown_as_its_column_says_or_as_the_word_it_is():
    kinds = {"paper": "paper number", "here": "number"}
    rows = [["1.2", "not run", "not run"], ["x" * 60, NOT_RUN, "not run" * 9]]
    table = Table(columns=["paper", "here", "because"], rows=rows, kinds=kinds)
    shown = page([Section("part", "title", [table])], Path())
    assert re.findall(r"<td([^>]*)>", shown) == [
        ' class="paper number"', ' class="number"', "",
        ' class="paper long"', ' class="number not-run"', ' class="long"',
    ]  # fmt: skip


def test_a_heading_is_said_once():
    table = Table(columns=["a"], rows=[["1"]], title="T1: methods")
    text = markdown([Section("part", table.title, [table, replace(table, title="another")])], Path())
    assert text.count("T1: methods") == 1 and "### another" in text and "### T1: methods" in table.to_markdown()
