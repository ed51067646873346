"""What a speed record shows, in plain words: from which length on Focus pays, how much, and where it does not."""

from __future__ import annotations

from collections.abc import Iterable

from focus_exp.records.record import Record
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting.speed_notes import about, distinct, mebibytes, number_text
from focus_exp.reporting.speed_series import (
    ATTENTION_CLOCKS,
    Setting,
    Timed,
    break_even,
    keeps_every_pair,
    label,
    series,
    setting,
    timed,
)
from focus_exp.reporting.speed_tables import lines
from focus_exp.reporting.speed_top_k import by_top_k
from focus_exp.reporting.tables import share_text

OPENINGS = {
    "attention": "With routing included",
    "kernels": "By its kernels alone",
    "prefill": "In a prefill of the whole model",
    "attention step": "In a training step of one attention layer",
    "model step": "In a training step of the whole model",
    "decode": "In a decode step of one attention layer",
    "decode model": "In a decode step of the whole model",
}


def speed_findings(record: Record) -> list[str]:
    """Sentences on break-even, best ratio, rows above their bound, memory, prefill, failures; [] without speed rows."""
    if not record.speed:
        return []
    found = [
        (clock, key, pairs)
        for clock in OPENINGS
        for key, rows in series(record, clock).items()
        if (pairs := timed(rows))
    ]
    pruned = [line for line in found if not _is_full_attention(line[2])]
    return [
        _measured(record),
        *(f"{_break_even(record, clock, key, pairs)} {_best(clock, pairs)}" for clock, key, pairs in pruned),
        *(said for clock, key, pairs in found for said in _above_bound(record, clock, key, pairs)),
        *_overhead(record),
        *(said for clock in OPENINGS if clock != "kernels" for said in _memory(record, clock)),
        *(said for clock, key, pairs in pruned if clock == "prefill" for said in _prefill(record, key, pairs)),
        *_full_attention(record, {key for _, key, pairs in found if _is_full_attention(pairs)}),
        *_failed(record),
        _claim(record),
    ]


def _is_full_attention(pairs: Timed) -> bool:
    return all(keeps_every_pair(row) for row, _ in pairs)


def _measured(record: Record) -> str:
    rows = [row for row, _ in timed(record.speed)]
    parts = {
        "on {}": record.device or "an unnamed device",
        "in {}": distinct(row.dtype for row in rows),
        "against full attention by {}": distinct(row.full_kernel for row in rows),
        "medians of {} repeats": distinct(row.repeats or "" for row in rows),
    }
    known = [text.format(value) for text, value in parts.items() if value]
    return f"Measured {'; '.join(known)}." if rows else "Nothing was timed."


def _break_even(record: Record, clock: str, key: Setting, pairs: Timed) -> str:
    """From which length on a series is faster; where it is slower, by how much."""
    found = break_even([(row.tokens, ratio) for row, ratio in pairs])
    first, last = pairs[0][0].tokens, pairs[-1][0].tokens
    once = f"at the one length measured, {last:,} tokens" if first == last else ""
    if found.tokens is None and not found.early:
        said = f"is slower than full attention {once or f'at every length measured up to {last:,} tokens'}"
    elif found.tokens is None:
        said = f"does not break even: it is faster than full attention at {_listed(found.early)} tokens, "
        said += f"but slower again at the longest length measured, {last:,} tokens"
    elif not found.slower:
        said = f"is faster than full attention {once or f'at every length measured from {first:,} tokens'}"
    else:
        said = f"breaks even at about {about(found.tokens)} tokens on this device"
        said += f", though it is faster already at {_listed(found.early)} tokens" if found.early else ""
    times = [f"{number_text(1 / ratio)} times as long at {row.tokens:,}" for row, ratio in pairs if ratio < 1]
    tail = f"; it takes {_and(times)} tokens" if times else ""
    return f"{OPENINGS[clock]}, {label(record, key)} {said}{tail}."


def _best(clock: str, pairs: Timed) -> str:
    row, ratio = max(pairs, key=lambda pair: pair[1])
    best = f"best ratio is {number_text(ratio)}, at {row.tokens:,} tokens"
    said = f"Its {best if len(pairs) > 1 else f'ratio is {number_text(ratio)}'}"
    if clock in ATTENTION_CLOCKS and row.bound:
        said += f": {share_text(ratio / row.bound)} of its bound of {number_text(row.bound)}"
    return f"{said}."


def _above_bound(record: Record, clock: str, key: Setting, pairs: Timed) -> list[str]:
    """Every ratio above its arithmetic bound, and whether full attention's own pace at other lengths explains it."""
    said = []
    for row, ratio in pairs if clock in ATTENTION_CLOCKS else []:
        if row.bound is None or ratio <= row.bound:
            continue
        others = [other for other, _ in pairs if other.tokens != row.tokens and other.full_kernel == row.full_kernel]
        where = f"{OPENINGS[clock]}, {label(record, key)} is above its bound at {row.tokens:,} tokens"
        numbers = f"{number_text(ratio)} against {number_text(row.bound)}"
        said.append(f"{where} ({numbers}): {_reason(row, ratio, row.bound, others)}.")
    return said


def _reason(row: SpeedRow, ratio: float, bound: float, others: list[SpeedRow]) -> str:
    if not others:
        return "unexplained, for want of another length to compare with: treat as noise"
    quickest = min(others, key=_seconds_per_pair)
    slowdown = _seconds_per_pair(row) / _seconds_per_pair(quickest)
    pace = f"full attention takes {number_text(slowdown)} times as long per pair as at {quickest.tokens:,} tokens"
    if ratio / slowdown <= bound:
        return f"{pace}; at that pace the ratio would be {number_text(ratio / slowdown)}"
    return f"unexplained, for {pace}, which is not enough: treat as noise"


def _seconds_per_pair(row: SpeedRow) -> float:
    """Full attention's time for one causal pair."""
    pairs = row.tokens + 1 if row.clock == "decode" else row.tokens * (row.tokens + 1) / 2
    return (row.full_seconds or 0.0) / pairs


def _overhead(record: Record) -> list[str]:
    """What routing costs at each setting's longest length."""
    longest = {setting(line.case): line for line in lines(record, "attention") if line.overhead is not None}
    return [
        f"Routing, sort, gather and merge take {share_text(line.overhead)} of the time of {label(record, key)} "
        f"at {line.case.tokens:,} tokens."
        for key, line in longest.items()
    ]


def _memory(record: Record, clock: str) -> list[str]:
    rows = [row for row in record.speed if row.clock == clock and row.full_peak_bytes and row.focus_peak_bytes]
    if not rows:
        return []
    worst, longest = max(rows, key=_peak_ratio), max(rows, key=lambda row: (row.tokens, _peak_ratio(row)))
    if number_text(_peak_ratio(worst)) == number_text(_peak_ratio(longest)):
        worst = longest
    what = "the cache" if clock.startswith("decode") else "peak memory"
    said = f"{OPENINGS[clock]}, {what} is at most {_peak(record, worst)}"
    return [f"{said}." if worst is longest else f"{said}; at the longest length {_peak(record, longest)}."]


def _peak_ratio(row: SpeedRow) -> float:
    assert row.full_peak_bytes and row.focus_peak_bytes
    return row.focus_peak_bytes / row.full_peak_bytes


def _peak(record: Record, row: SpeedRow) -> str:
    assert row.full_peak_bytes and row.focus_peak_bytes
    sizes = f"{mebibytes(row.focus_peak_bytes)} against {mebibytes(row.full_peak_bytes)} MiB"
    where = f"{label(record, setting(row))}, {row.tokens:,} tokens"
    return f"{number_text(_peak_ratio(row))} times that of full attention ({sizes}; {where})"


def _prefill(record: Record, key: Setting, pairs: Timed) -> list[str]:
    """How much of the longest prefill is attention, and that the rest of the model takes as long beside either."""
    row = pairs[-1][0]
    full, focus = row.full_attention_seconds, row.focus_attention_seconds
    if full is None or focus is None or not row.full_seconds or not row.focus_seconds:
        return []
    return [
        f"In a prefill of {row.tokens:,} tokens attention takes {share_text(full / row.full_seconds)} of the time with "
        f"full attention and {share_text(focus / row.focus_seconds)} with Focus ({label(record, key)}); the rest "
        f"takes {number_text(row.full_seconds - full)} s and {number_text(row.focus_seconds - focus)} s."
    ]


def _full_attention(record: Record, keys: set[Setting]) -> list[str]:
    names = _and([label(record, key) for key in sorted(keys)])
    return [f"Every pair is kept, so this is full attention and no speed-up: {names}."] if keys else []


def _failed(record: Record) -> list[str]:
    failed = [(row, " ".join(row.error.split())) for row in record.speed if row.error is not None]
    return [
        f"{OPENINGS[row.clock]}, {label(record, setting(row))} failed at {row.tokens:,} tokens: {error}"
        for row, error in failed
    ]


def _claim(record: Record) -> str:
    said = "K/k, which the paper prints as a speedup, is a count of groups and not a wall-clock"
    pairs = [(row, ratio) for row, ratio in timed(by_top_k(record)) if not keeps_every_pair(row)]
    # quality is the trained router's, so where it was timed its times are the ones to quote
    quoted = "trained" if any(row.assignment == "trained" for row, _ in pairs) else "balanced"
    measured = [
        f"{label(record, setting(row))} has K/k {number_text(row.groups / row.top_k)} and measures {number_text(ratio)}"
        for row, ratio in pairs
        if row.assignment == quoted
    ]
    return f"{said}: {_and(measured)}." if measured else f"{said}; what is measured is the ratio of times."


def _listed(lengths: Iterable[int]) -> str:
    return _and([f"{tokens:,}" for tokens in lengths])


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
