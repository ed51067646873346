"""What a speed record shows: from which length on Focus pays, how much, and where it does not."""

from collections.abc import Iterator

from focus_exp.records.record import Record
from focus_exp.records.speed import MASKED, SpeedRow
from focus_exp.reporting.formats import number_text
from focus_exp.reporting.sentences import say, tell
from focus_exp.reporting.speed import keeps_every_pair, label, quickest, quoted, series, setting, timed, timings

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
    found = [each for clock in OPENINGS for each in series(record, clock) if each.timed]
    rows = timed(record.speed)
    yield say("timed", rows=rows, device=record.device)
    for each in found:
        yield from tell("pace", series=each, opening=OPENINGS[each.clock])
    for each in found:
        for row in each.timed:
            other, slow = quickest(row, each.timed) or (None, None)
            yield from tell("above_bound", [row], series=each, opening=OPENINGS[each.clock], other=other, slowdown=slow)
    split = [line for line in timings(record, "attention") if line.overhead is not None]
    longest = {setting(line.case): line for line in split if not keeps_every_pair(line.case)}
    for key, line in longest.items():
        yield say("overhead", line=line, name=label(record, key))
    yield from _memory(record)
    for each in found:
        yield from tell("prefill", series=each, row=each.timed[-1])
    if full := sorted({each.setting for each in found if each.is_full}):
        yield say("full_attention", names=[label(record, key) for key in full])
    for row in record.speed:
        yield from tell("failed_speed", row=row, opening=OPENINGS[row.clock], name=label(record, setting(row)))
    compared = [row for row in quoted(record) if not keeps_every_pair(row)]
    yield say("claimed", measured=[say("measured", row=row, name=label(record, setting(row))) for row in compared])


def _memory(record: Record) -> Iterator[str]:
    def peak(row: SpeedRow) -> float:
        return (row.focus_peak_bytes or 0) / (row.full_peak_bytes or 1)

    for clock, opening in OPENINGS.items():
        rows = [row for row in record.speed if row.clock == clock and row.full_peak_bytes and row.focus_peak_bytes]
        if rows and clock != "kernels":
            worst, longest = max(rows, key=peak), max(rows, key=lambda row: (row.tokens, peak(row)))
            shown = [longest] if number_text(peak(worst)) == number_text(peak(longest)) else [worst, longest]
            peaks = [say("peak", row=row, ratio=peak(row), name=label(record, setting(row))) for row in shown]
            yield say("memory", opening=opening, clock=clock, peaks=peaks)


def method_findings(record: Record) -> Iterator[str]:
    """The ratios of other methods at each length, those of layers by masks over all pairs apart."""
    layers = [row for row in record.method_speed if row.clock == "attention"]
    for tokens in dict.fromkeys(row.tokens for row in layers):
        rows = [row for row in layers if row.tokens == tokens and row.ratio]
        parts = {"unmasked": [r for r in rows if r.path != MASKED], "masked": [r for r in rows if r.path == MASKED]}
        if rows:
            yield say("methods", tokens=tokens, parts=[say(part, rows=found) for part, found in parts.items() if found])
    wholes = [row for row in record.method_speed if row.clock == "prefill" and row.ratio]
    for name in dict.fromkeys(row.method for row in wholes):
        yield say("method_prefill", name=name, rows=[row for row in wholes if row.method == name])
