"""What a speed record shows: from which length on Focus pays, how much, and where it does not."""

from __future__ import annotations

from collections.abc import Iterator

from focus_exp.records.record import Record
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting.formats import distinct_text, listed_text, number_text
from focus_exp.reporting.sentences import say
from focus_exp.reporting.speed import (
    ATTENTION_CLOCKS,
    Timed,
    break_even,
    by_top_k,
    keeps_every_pair,
    label,
    overhead,
    quickest,
    series,
    setting,
    timed,
)

MASKED = "masked"
OPENINGS = {
    "attention": "With routing included",
    "kernels": "By its kernels alone",
    "prefill": "In a prefill of the whole model",
    "attention step": "In a training step of one attention layer",
    "model step": "In a training step of the whole model",
    "decode": "In a decode step of one attention layer",
    "decode model": "In a decode step of the whole model",
}


def speed_findings(record: Record) -> Iterator[str]:
    """Break-even, best ratio, rows above their bound, memory, prefill, failures; nothing without speed rows."""
    if not record.speed:
        return
    found = [pairs for clock in OPENINGS for rows in series(record, clock).values() if (pairs := timed(rows))]
    full = [pairs for pairs in found if all(keeps_every_pair(row) for row, _ in pairs)]
    pruned = [pairs for pairs in found if pairs not in full]
    yield _timed(record)
    yield from (_pace(record, pairs) for pairs in pruned)
    for pairs in found:
        yield from _above_bound(record, pairs)
    yield from _overhead(record)
    yield from _memory(record)
    for row in (pairs[-1][0] for pairs in pruned if pairs[0][0].clock == "prefill"):
        if row.full_attention_seconds is not None and row.focus_attention_seconds is not None:
            yield say("prefill", row=row, name=label(record, setting(row)))
    if full:
        keys = sorted({setting(pairs[0][0]) for pairs in full})
        yield say("full_attention", names=listed_text([label(record, key) for key in keys]))
    for row in record.speed:
        if row.error is not None:
            yield say("failed_speed", row=row, **_named(record, row))
    yield _claimed(record)


def _named(record: Record, row: SpeedRow) -> dict[str, str]:
    return {"opening": OPENINGS[row.clock], "name": label(record, setting(row))}


def _timed(record: Record) -> str:
    rows = [row for row, _ in timed(record.speed)]
    dtypes, kernels = distinct_text(row.dtype for row in rows), distinct_text(row.full_kernel for row in rows)
    repeats = distinct_text(row.repeats or "" for row in rows)
    return say("timed", rows=rows, device=record.device, dtypes=dtypes, kernels=kernels, repeats=repeats)


def _pace(record: Record, pairs: Timed) -> str:
    """From which length on a series is faster; where it is slower, by how much; its best ratio."""
    found = break_even([(row.tokens, ratio) for row, ratio in pairs])
    best, _ = max(pairs, key=lambda pair: pair[1])
    return say(
        "pace",
        **_named(record, best),
        found=found,
        first=pairs[0][0].tokens,
        last=pairs[-1][0].tokens,
        early=listed_text([f"{tokens:,}" for tokens in found.early]),
        slower=listed_text([say("slower", row=row) for row, ratio in pairs if ratio < 1]),
        best=best,
        bounded=best.clock in ATTENTION_CLOCKS,
    )


def _above_bound(record: Record, pairs: Timed) -> Iterator[str]:
    """Every ratio above its arithmetic bound, and whether full attention's own pace at other lengths explains it."""
    for row, ratio in pairs:
        if row.clock in ATTENTION_CLOCKS and row.bound is not None and ratio > row.bound:
            other, slowdown = quickest(row, pairs) or (None, None)
            per_pair = say("per_pair", slowdown=slowdown, other=other) if other else ""
            yield say("above_bound", row=row, slowdown=slowdown, per_pair=per_pair, **_named(record, row))


def _overhead(record: Record) -> Iterator[str]:
    """What routing costs at each setting's longest length."""
    for key, rows in series(record, "attention").items():
        known = [(row, share) for row in rows if (share := overhead(record, row)) is not None]
        for row, share in known[-1:]:
            yield say("overhead", row=row, overhead=share, name=label(record, key))


def _memory(record: Record) -> Iterator[str]:
    for clock, opening in OPENINGS.items():
        measured = [
            (row, row.focus_peak_bytes / row.full_peak_bytes)
            for row in record.speed
            if row.clock == clock and clock != "kernels" and row.full_peak_bytes and row.focus_peak_bytes
        ]
        if measured:
            worst = max(measured, key=lambda pair: pair[1])
            longest = max(measured, key=lambda pair: (pair[0].tokens, pair[1]))
            if number_text(worst[1]) == number_text(longest[1]):
                worst = longest
            peaks = (say("peak", row=row, name=label(record, setting(row))) for row, _ in (worst, longest))
            what = "the cache" if clock.startswith("decode") else "peak memory"
            yield say("memory", opening=opening, what=what, **dict(zip(("worst", "longest"), peaks, strict=True)))


def _claimed(record: Record) -> str:
    rows = [row for row, _ in timed(by_top_k(record)) if not keeps_every_pair(row)]
    # quality is the trained router's, so where it was timed its times are the ones to quote
    quoted = "trained" if any(row.assignment == "trained" for row in rows) else "balanced"
    measured = [say("measured", row=row, name=label(record, setting(row))) for row in rows if row.assignment == quoted]
    return say("claimed", measured=listed_text(measured))


def method_findings(record: Record) -> Iterator[str]:
    """The ratios of other methods' layers at each length, those of masks over all pairs apart."""
    for tokens in dict.fromkeys(row.tokens for row in record.method_speed):
        rows = [row for row in record.method_speed if row.tokens == tokens and row.ratio]
        parts = {
            "unmasked": [row for row in rows if row.path != MASKED],
            "masked": [row for row in rows if row.path == MASKED],
        }
        if rows:
            yield say("methods", tokens=tokens, parts=[say(part, rows=found) for part, found in parts.items() if found])
