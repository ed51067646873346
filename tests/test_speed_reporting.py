"""Tables, figures and findings of the speed benchmark, on records whose numbers are invented here."""

from __future__ import annotations

import csv
import io
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from focus_exp.errors import UserError
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting import paper
from focus_exp.reporting.figures import figures, write_figures
from focus_exp.reporting.paper import paper_rows, paper_speedups
from focus_exp.reporting.report import all_findings
from focus_exp.reporting.speed import break_even
from focus_exp.reporting.tables import all_tables

CONFIG = {"attention": {"groups": 4}, "bench": {"heads": 9, "kv_heads": 3}}


def make_row(clock="attention", tokens=1024, ratio=2.0, groups=8, assignment="balanced", **changes) -> SpeedRow:
    """A row whose full attention costs 1 ns a pair."""
    full = 1e-9 * tokens * (tokens + 1) / 2
    values = {
        "dtype": "bfloat16",
        "full_kernel": "plain",
        "path": "sparse",
        "repeats": 5,
        "full_seconds": full,
        "focus_seconds": full / ratio,
        "full_peak_bytes": 100 * 2**20,
        "focus_peak_bytes": 110 * 2**20,
        "pairs_kept": 0.2,
        "largest_group": 0.15,
    }
    return SpeedRow(clock=clock, tokens=tokens, groups=groups, assignment=assignment, **{**values, **changes})


def make_failed(**where) -> SpeedRow:
    values = {
        "clock": "attention",
        "groups": 8,
        "assignment": "balanced",
        "dtype": "bfloat16",
        "error": "out of\nmemory",
    }
    return SpeedRow(**{**values, **where})


def make_curve(ratios: dict[int, float], **changes) -> list[SpeedRow]:
    return [make_row(tokens=tokens, ratio=ratio, **changes) for tokens, ratio in ratios.items()]


def make_record(*rows: SpeedRow, **changes) -> Record:
    values = {"status": "finished", "experiment": "speed", "device": "cpu", "config": CONFIG, "command": "run it"}
    return Record(**{**values, "speed": list(rows), **changes})


def make_quality(top_k: int, perplexity: float, rule="query_topk", kept=0.3, **changes) -> Row:
    values = {"perplexity": perplexity, "nll": math.log(perplexity), "delta_nll": 0.01, "distant_pairs_kept": kept}
    values |= {"top_k": top_k, "pair_rule": rule, "causal": True, **changes}
    return Row(name=f"hard k={top_k}", kind="hard", method="focus", **values)


def cells(table) -> list[dict[str, str]]:
    lines = [line.strip("| ").split(" | ") for line in table.to_markdown().splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def parsed(table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table.to_csv())))


def only_table(record: Record):
    (table,) = all_tables(record)
    return table


# the paper's numbers


def test_paper_rows_are_the_yaml():
    source = yaml.safe_load((Path(paper.__file__).parent / "paper_tables.yaml").read_text(encoding="utf-8"))
    nested = {f"{outer}.{inner}": part for outer, table in source.items() for inner, part in table.items()}
    tables = {name: part for name, part in (source | nested).items() if isinstance(part, dict) and "rows" in part}
    assert len(tables) > 12
    for name, table in tables.items():
        # PyYAML reads 1.0e6 as a string
        expected = [[_number(cell) for cell in row] for row in table["rows"]]
        assert [list(row.values()) for row in paper_rows(name)] == expected
        assert all(list(row) == table["columns"] for row in paper_rows(name))
    assert not any(isinstance(row["trainable_params"], str) for row in paper_rows("table1_retrofit"))


def _number(cell):
    try:
        return float(cell) if isinstance(cell, str) else cell
    except ValueError:
        return cell


def test_paper_rows_cannot_be_spoilt_and_names_are_checked():
    paper_rows("table6_speed")[0]["speedup_K8"] = 99
    assert paper_speedups(8)[1024] == 0.2 and paper_speedups(8)[1048576] == 8.6 and paper_speedups(5) == {}
    with pytest.raises(UserError, match="'table66' is unknown; choose one of table1_retrofit"):
        paper_rows("table66")


# break-even


@pytest.mark.parametrize(
    ("points", "tokens", "slower", "early"),
    [
        ([(1024, 0.5), (2048, 2.0)], 1024 * math.sqrt(2), (1024,), ()),
        ([(1024, 0.5), (2048, 1.0), (4096, 3.0)], 2048, (1024,), ()),
        ([(1024, 0.5), (2048, 0.9)], None, (1024, 2048), ()),
        ([(1024, 1.0), (2048, 1.5)], 1024, (), ()),
        ([(1024, 0.9)], None, (1024,), ()),
        ([(1024, 1.1)], 1024, (), ()),
        ([(1024, 1.5), (2048, 0.5), (4096, 2.0)], 2048 * math.sqrt(2), (2048,), (1024,)),
        ([(1024, 0.5), (2048, 2.0), (4096, 0.8)], None, (1024, 4096), (2048,)),
    ],
)
def test_break_even_cases(points, tokens, slower, early):
    found = break_even(points)
    assert found.tokens == (None if tokens is None else pytest.approx(tokens))
    assert (found.slower, found.early) == (slower, early)


ratios = st.floats(0.05, 20) | st.just(1.0)


@given(st.dictionaries(st.integers(16, 2**20), ratios, min_size=1, max_size=8), st.randoms())
def test_break_even_is_where_the_drawn_line_stays_above_one(curve, random):
    points = list(curve.items())
    random.shuffle(points)
    found = break_even(points)
    lengths = sorted(curve)
    values = [curve[tokens] for tokens in lengths]
    assert found.slower == tuple(tokens for tokens in lengths if curve[tokens] < 1)
    assert found.early == tuple(n for n in lengths if curve[n] >= 1 and any(m > n for m in found.slower))
    assert (found.tokens is None) == (values[-1] < 1)
    if found.tokens is None:
        return
    line = lambda tokens: np.interp(np.log(tokens), np.log(lengths), np.log(values))  # noqa: E731
    assert lengths[0] <= found.tokens <= lengths[-1] * (1 + 1e-9)
    assert (line(np.geomspace(found.tokens, lengths[-1], 200)) >= -1e-6).all()
    if found.slower:
        assert line(found.tokens) == pytest.approx(0, abs=1e-6)
        below = max(found.slower)
        assert (line(np.geomspace(below, found.tokens, 50)[:-1]) < 1e-6).all()
    else:
        assert found.tokens == lengths[0]


# tables


def test_attention_and_kernels_stand_in_one_line():
    attention = make_row(tokens=16384, ratio=4.0)
    kernels = make_row("kernels", tokens=16384, ratio=4.5, path="other", full_seconds=0.2, focus_seconds=0.03)
    table = only_table(make_record(kernels, attention))
    (line,) = cells(table)
    assert (line["tokens"], line["K"], line["groups"]) == ("16,384", "8", "balanced")
    assert (line["full [ms]"], line["kernels [ms]"], line["kernels ratio"]) == ("134", "30.0", "6.67")
    assert (line["with routing [ms]"], line["ratio"], line["routing etc."]) == ("33.6", "4.00", "10.6 %")
    assert (line["bound"], line["measured / bound"], line["pairs kept"]) == ("5.00", "80.0 %", "20.0 %")
    assert line["peak memory, Focus / full [MiB]"] == "1.10 (110 / 100)"
    assert (line["largest group"], line["path"], line["paper, H100"]) == ("15.0 %", "sparse", "1.8")
    (values,) = parsed(table)
    assert float(values["focus_seconds"]) == attention.focus_seconds != pytest.approx(0.0336, abs=1e-6)
    assert float(values["ratio"]) == attention.ratio and float(values["kernels_ratio"]) == kernels.ratio
    assert float(values["overhead"]) == 1 - 0.03 / attention.focus_seconds
    assert (values["kernels_path"], values["device"], values["paper_h100_ratio"]) == ("other", "cpu", "1.8")
    notes = "\n".join(table.notes)
    assert "dtype bfloat16, full attention by plain, repeats 5, window 128" in notes and "heads 9, kv_heads 3" in notes
    assert "device cpu" in notes and "command run it" in notes


@pytest.mark.parametrize(
    ("changes", "printed"),
    [
        ({"tokens": 1024, "groups": 4}, "0.2"),
        ({"tokens": 8192}, "-"),
        ({"tokens": 16384, "groups": 16}, "-"),
        ({"tokens": 16384, "top_k": 2}, "-"),
        ({"tokens": 1048576}, "8.6"),
    ],
)
def test_the_papers_ratio_is_printed_only_where_the_paper_has_it(changes, printed):
    assert [line["paper, H100"] for line in cells(only_table(make_record(make_row(**changes))))] == [printed]


def test_every_clock_has_its_table():
    shares = {"full_attention_seconds": 0.4, "focus_attention_seconds": 0.1}
    prefill = make_row("prefill", 8192, full_seconds=1.0, focus_seconds=0.8, **shares)
    step = make_row("attention step", 8192, ratio=3.0)
    tables = all_tables(make_record(prefill, step, make_row("model step", 8192, ratio=1.5), make_row()))
    assert [table.name for table in tables] == [
        "speed_attention", "speed_prefill", "speed_attention_step", "speed_model_step",
    ]  # fmt: skip
    assert len({table.title for table in tables}) == 4
    (line,) = cells(tables[1])
    assert (line["full [s]"], line["Focus [s]"], line["ratio"]) == ("1.00", "0.8", "1.25")
    assert (line["attention's share, full"], line["attention's share, Focus"]) == ("40.0 %", "12.5 %")
    assert "bound" not in line and "measured / bound" in cells(tables[2])[0]
    assert cells(tables[3])[0]["ratio"] == "1.50"


def test_a_failed_row_and_substitutes_stay_visible():
    model = {"name": "tiny", "substitution": "tiny stands in for large."}
    rows = [make_row(), make_failed(tokens=2048), make_failed(tokens=2048, clock="kernels", error="no kernel")]
    table = only_table(make_record(*rows, model=model, status="interrupted", error="SIGTERM"))
    assert [line["with routing [ms]"] for line in cells(table)] == ["0.262", "failed"]
    assert [line["kernels [ms]"] for line in cells(table)] == ["-", "failed"]
    text = table.to_markdown()
    assert "- attention, K=8 with balanced groups, 2,048 tokens failed: out of memory" in text
    assert "2,048 tokens failed: no kernel" in text
    assert "- SUBSTITUTE: tiny stands in for large." in text and "- This run interrupted: SIGTERM" in text
    assert [row["error"] for row in parsed(table)] == ["", "out of\nmemory"]


def test_settings_are_told_apart_and_one_group_a_token_names_no_rule():
    rows = [make_row(), make_row("kernels", pair_rule="share"), make_row(top_k=2, pair_rule="share")]
    assert [line["K"] for line in cells(all_tables(make_record(*rows))[0])] == ["8", "8 (k=2, share)"]
    table = only_table(make_record(make_row(), make_row(window=64)))
    assert [line["K"] for line in cells(table)] == ["8 (window 64)", "8 (window 128)"]


optional = st.none() | st.floats(1e-9, 1e9)
speed_row = st.builds(
    SpeedRow,
    clock=st.sampled_from(["kernels", "attention", "prefill", "attention step", "model step"]),
    tokens=st.sampled_from([512, 1024, 16384]),
    groups=st.integers(2, 4),
    assignment=st.sampled_from(["balanced", "trained"]),
    top_k=st.integers(1, 2),
    pair_rule=st.sampled_from(["query_topk", "share"]),
    full_seconds=optional,
    focus_seconds=optional,
    full_attention_seconds=optional,
    focus_attention_seconds=optional,
    full_peak_bytes=st.none() | st.integers(0, 2**40),
    focus_peak_bytes=st.none() | st.integers(0, 2**40),
    pairs_kept=st.none() | st.floats(0.001, 1),
    largest_group=st.none() | st.floats(0, 1),
)


@given(rows=st.lists(speed_row, max_size=6), failures=st.lists(st.sampled_from([512, 2048]), max_size=2))
def test_no_row_is_lost_whatever_was_measured(rows, failures):
    failed = [make_failed(tokens=tokens, error=f"broke {index}") for index, tokens in enumerate(failures)]
    record = make_record(*rows, *failed, rows=[make_quality(1, 30.0), make_quality(2, 29.0, "share")])
    tables = [table for table in all_tables(record) if table.name != "speed_top_k"]
    values = [row for table in tables for row in parsed(table)]
    printed = [row.get(name, "") for row in values for name in ("focus_seconds", "kernels_focus_seconds")]
    measured = [str(row.focus_seconds) for row in rows if row.focus_seconds is not None]
    assert sorted(value for value in printed if value) == sorted(measured)
    said = "\n".join(all_findings(record))
    notes = "\n".join(note for table in tables for note in table.notes)
    assert all(row.error in said and row.error in notes for row in failed)


# quality beside speed


def make_top_k_record(**changes) -> Record:
    settings = [(1, "query_topk", 0.3), (2, "query_topk", 0.5), (2, "share", 0.8), (3, "share", 1.0)]
    speed = [
        make_row(
            tokens=tokens, ratio=0.8 / kept, groups=4, assignment="trained", top_k=k, pair_rule=rule, pairs_kept=kept
        )
        for tokens in (4096, 8192)
        for k, rule, kept in settings
    ]
    quality = [
        Row(name="base", kind="base", method="full", causal=True, nll=3.4, perplexity=30.0),
        make_quality(1, 33.0, "share"),
        make_quality(2, 32.0, "query_topk", 0.5),
        make_quality(2, 31.0, "share", 0.8),
        make_quality(3, 30.0, "share", 1.0),
    ]
    return make_record(*speed, **{"rows": quality, **changes})


def test_top_k_table_sets_measured_time_beside_the_claim():
    table = all_tables(make_top_k_record())[-1]
    claim = next(column for column in table.columns if "K/k" in column)
    assert "claim" in claim and "not a measurement" in claim
    lines = cells(table)
    assert [line["k"] for line in lines] == ["1", "2 (query_topk)", "2 (share)", "3 (share)"]
    assert [line["perplexity"] for line in lines] == ["33.00", "32.00", "31.00", "30.00"]
    assert [line["paper: perplexity"] for line in lines] == ["82.9", "41.3", "41.3", "47.2"]
    assert [line[claim] for line in lines] == ["4.0", "2.0", "2.0", "1.3"]
    assert [line["measured ratio, attention with routing"] for line in lines] == ["2.67", "1.60", "1.00", "0.8"]
    assert [line["bound of attention"] for line in lines] == ["3.33", "2.00", "1.25", "1.00"]
    assert {line["tokens"] for line in lines} == {"8,192"}
    marked = ["full attention" in line["distant pairs kept"] for line in lines]
    assert marked == [False, False, False, True]
    assert lines[3]["paper: distant pairs kept"] == "100.0 % (full attention)"
    assert [float(row["perplexity"]) for row in parsed(table)] == [33.0, 32.0, 31.0, 30.0]


def test_top_k_table_does_not_borrow_another_models_quality():
    other = make_top_k_record(config={"attention": {"groups": 8}})
    assert {line["perplexity"] for line in cells(all_tables(other)[-1])} == {"-"}
    eight = make_record(*(make_row(groups=8, top_k=k) for k in (1, 2)), rows=make_top_k_record().rows)
    assert {line["paper: perplexity"] for line in cells(all_tables(eight)[-1])} == {"-"}
    assert [table.name for table in all_tables(make_record(make_row()))] == ["speed_attention"]


def test_top_k_table_compares_at_the_longest_common_length_and_keeps_failures():
    rows = [*make_curve({1024: 2.0, 4096: 3.0}, groups=4), make_row(groups=4, top_k=2), make_failed(tokens=9, top_k=3)]
    record = make_record(*rows, rows=[make_quality(2, 30.0, error="no memory")])
    lines = cells(all_tables(record)[-1])
    assert [line["tokens"] for line in lines] == ["1,024", "1,024", "9"]
    assert lines[1]["perplexity"] == "failed" and lines[2]["measured ratio, attention with routing"] == "failed"
    prefill = make_record(make_row("prefill"), make_row("prefill", top_k=2))
    assert "measured ratio, prefill" in all_tables(prefill)[-1].columns


# findings


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            make_curve({1024: 0.8, 2048: 1.5, 4096: 3.0}),
            "With routing included, K=8 with balanced groups breaks even at about 1,300 tokens on this device; it "
            "takes 1.25 times as long at 1,024 tokens. Its best ratio is 3.00, at 4,096 tokens: 60.0 % of its bound of",
        ),
        (
            make_curve({1024: 0.5, 2048: 0.8}, clock="kernels", groups=4, assignment="trained"),
            "By its kernels alone, K=4 with a trained router is slower than full attention at every length measured up "
            "to 2,048 tokens; it takes 2.00 times as long at 1,024 and 1.25 times as long at 2,048 tokens.",
        ),
        (
            make_curve({1024: 1.2, 2048: 2.0}),
            "is faster than full attention at every length measured from 1,024 tokens",
        ),
        (make_curve({1024: 1.2}), "is faster than full attention at the one length measured, 1,024 tokens. Its ratio"),
        (make_curve({1024: 0.5, 2048: 2.0, 4096: 0.5}), "does not break even: it is faster than full attention at 2,0"),
        (make_curve({1024: 2.0, 2048: 0.5, 4096: 2.0}), "about 2,900 tokens on this device, though it is faster alr"),
        (make_curve({1024: 2.0}, clock="prefill"), "In a prefill of the whole model, K=8 with balanced groups is"),
        (make_curve({8192: 2.0}, clock="model step"), "In a training step of the whole model, K=8"),
        (
            [*make_curve({1024: 3.0}), make_row(tokens=2048, ratio=6.0, full_seconds=3e-9 * 2048 * 2049 / 2)],
            "is above its bound at 2,048 tokens (18.0 against 5.00): unexplained, for full attention takes 3.00 times "
            "as long per pair as at 1,024 tokens, which is not enough: treat as noise.",
        ),
        (
            [*make_curve({1024: 3.0}), make_row(tokens=2048, ratio=3.0, full_seconds=2e-9 * 2048 * 2049 / 2)],
            "(6.00 against 5.00): full attention takes 2.00 times as long per pair as at 1,024 tokens; at that pace "
            "the ratio would be 3.00.",
        ),
        (make_curve({1024: 3.0, 2048: 6.0}), "unexplained, for full attention takes 1.00 times as long per pair"),
        (make_curve({1024: 6.0}), "(6.00 against 5.00): unexplained, for want of another length"),
        (
            [make_row(ratio=6.0), make_row(tokens=2048, full_kernel="another")],
            "(6.00 against 5.00): unexplained, for want of another length",
        ),
        (
            [make_row(ratio=2.0), make_row("kernels", ratio=2.5)],
            "Routing, sort, gather and merge take 20.0 % of the time of K=8 with balanced groups at 1,024 tokens.",
        ),
        (
            [make_row(focus_peak_bytes=150 * 2**20), make_row(tokens=2048)],
            "peak memory beside what was held before is at most 1.50 times that of full attention (150 against 100 "
            "MiB; K=8 with balanced groups, 1,024 tokens); at the longest length 1.10 times",
        ),
        (
            [
                make_row(
                    "prefill",
                    8192,
                    full_seconds=2.0,
                    focus_seconds=1.5,
                    full_attention_seconds=1.0,
                    focus_attention_seconds=0.45,
                )
            ],
            "In a prefill of 8,192 tokens attention takes 50.0 % of the time with full attention and 30.0 % with Focus "
            "(K=8 with balanced groups); the rest takes 1.00 s and 1.05 s.",
        ),
        (
            [make_row(), make_failed(tokens=4096, dtype="")],
            "K=8 with balanced groups failed at 4,096 tokens: out of memory",
        ),
        ([make_row(), make_failed(tokens=4096, dtype="")], "included, K=8 with balanced groups is faster"),
        ([make_failed(tokens=4096)], "Nothing was timed."),
        ([make_row()], "K/k, which the paper prints as a speedup, is a count of groups and not a wall-clock"),
        ([make_row()], "Measured on cpu; in bfloat16; against full attention by plain; medians of 5 repeats."),
    ],
)
def test_findings_say(rows, sentence):
    assert sentence in "\n".join(all_findings(make_record(*rows)))


def test_findings_are_silent_where_there_is_nothing_to_say():
    assert not any("timed" in said or "K/k" in said for said in all_findings(make_record()))
    quiet = "\n".join(all_findings(make_record(*make_curve({1024: 0.5, 2048: 2.0}))))
    assert all(word not in quiet for word in ("above its bound", "failed", "already", "full attention and no speed-up"))
    # a whole model is not bounded by the pairs of its attention
    assert "bound" not in "\n".join(all_findings(make_record(make_row("prefill", ratio=9.0))))


def test_findings_quote_measured_times_against_the_claim_and_name_full_attention():
    said = all_findings(make_top_k_record())
    assert "K=4 (k=2, share) with a trained router has K/k 2.00 and measures 1.00" in said[-1]
    assert "k=3" not in said[-1]
    assert (
        "Every pair is kept, so this is full attention and no speed-up: K=4 (k=3, share) with a trained router." in said
    )
    assert not any("k=3" in sentence for sentence in said if "slower" in sentence)


# figures


def drawn(record: Record):
    """The figures of a record, before they become files."""
    return figures(record, [])


def test_figures_are_written_only_from_data(tmp_path):
    assert write_figures(make_record(make_failed(tokens=1024)), [], tmp_path) == {}
    assert write_figures(make_record(make_row("prefill")), [], tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
    paths = write_figures(make_top_k_record(), [], tmp_path / "figures")
    assert sorted(paths) == ["speed", "speed_quality"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        f"{name}.{suffix}" for name in ("speed", "speed_quality") for suffix in ("png", "svg")
    ]
    for path in paths.values():
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 10_000
        assert struct.unpack(">II", content[16:24])[0] == 1350


def test_speed_figure_draws_ratio_bound_break_even_and_paper():
    curve = {1024: 0.5, 2048: 2.0, 16384: 4.0}
    rows = [*make_curve(curve), *make_curve(curve, clock="kernels"), *make_curve(curve, assignment="trained")]
    figure = drawn(make_record(*rows, *make_curve(curve, top_k=2)))["speed"]
    upper, lower = figure.axes
    lines = [(line.get_linestyle(), line.get_xdata(), line.get_ydata()) for line in upper.lines]
    assert sum(list(y) == pytest.approx(list(curve.values())) for _, _, y in lines) == 3
    assert sum(list(y) == [5.0] * 3 for style, _, y in lines if style == "--") == 2
    assert any(list(x) == [1024, 4096, 16384] and list(y) == [0.2, 0.6, 1.8] for _, x, y in lines)
    marks = [list(x) for _, x, y in lines if list(y) == [1] and len(x) == 1]
    assert marks == [[pytest.approx(1024 * math.sqrt(2))]] * 2
    assert any(list(line.get_ydata()) == pytest.approx([0.1, 0.4, 0.8]) for line in lower.lines)
    assert upper.get_xscale() == upper.get_yscale() == "log"
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert "K=8 with balanced groups, breaks even at 1,400" in names and "paper, H100" in names
    figure = drawn(make_record(*make_curve({512: 2.0, 700: 3.0}, groups=3)))["speed"]
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert names == ["K=3 with balanced groups", "with routing", "bound: pairs of full / pairs of Focus"]


def test_quality_figure_sets_claims_apart_from_measurements():
    (axes,) = drawn(make_top_k_record())["speed_quality"].axes
    points = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert points["trained router, k=1"] == ([pytest.approx(0.8 / 0.3)], [33.0])
    assert points["the paper's claimed K/k, not a measurement"][0] == pytest.approx([4 / 3, 2, 2, 4])
    assert {text.get_text() for text in axes.texts} == {"k=1", "k=2", "k=3"}
    infinite = [make_quality(k, math.inf, nll=800.0) for k in (1, 2)]
    assert drawn(make_top_k_record(rows=infinite))["speed_quality"] is None
