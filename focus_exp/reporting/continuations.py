"""Continuations of held-out text: a table of what the base makes of them, and the texts themselves, to be read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

from focus_exp.records.record import Record
from focus_exp.records.rows import Continuation
from focus_exp.reporting.speed_notes import mebibytes, number_text
from focus_exp.reporting.tables import ABSENT, Table, assets, caveats, identity, origin, share_text, title
from focus_exp.storage import replace_file

SHOWN_WORDS = 60  # of a prompt's end


def continuation_table(record: Record) -> Table:
    """One line per attention, over all prompts."""
    names = list(dict.fromkeys(row.attention for row in record.continuations))
    groups = [[row for row in record.continuations if row.attention == name] for name in names]
    failed = [f"{row.attention}, prompt {row.prompt} failed: {row.error}" for row in record.continuations if row.error]
    return Table(
        columns=[
            *("attention", "prompts", "nats per token under the base (least to most)", "as full attention, tokens"),
            *("keys read per step", "share of those there", "tokens/s", "cache [MiB]"),
        ],
        rows=[_cells(name, rows) for name, rows in zip(names, groups, strict=True)],
        name="continuations",
        title=f"{title(record)}: continuations",
        notes=[
            *caveats(record),
            *failed,
            *assets(record),
            "nats per token under the base: minus its log-likelihood with full attention, given the prompt; low is "
            "what the base would say itself, which is not what a writer would",
            "as full attention: tokens before the first one that differs, median over prompts",
            "tokens/s: the prompt's own pass included; cache: room for tokens to come included",
            origin(record),
        ],
        values=[{"experiment": record.experiment, **asdict(row), **identity(record)} for row in record.continuations],
    )


def _cells(name: str, rows: list[Continuation]) -> list[str]:
    losses = [row.base_nll for row in rows if row.base_nll is not None]
    if not losses:
        return [name, str(len(rows)), "failed", *[ABSENT] * 5]
    agrees = [row.agrees for row in rows if row.agrees is not None]
    reads = [(row.read, row.prompt_tokens + row.tokens) for row in rows if row.read is not None]
    rates = [row.tokens / row.seconds for row in rows if row.seconds]
    held = [row.cache_bytes for row in rows if row.cache_bytes is not None]
    return [
        name,
        str(len(rows)),
        f"{mean(losses):.2f} ({min(losses):.2f} to {max(losses):.2f})",
        f"{median(agrees):.0f} of {rows[0].tokens}" if agrees else ABSENT,
        f"{mean(read for read, _ in reads):,.0f}" if reads else ABSENT,
        share_text(mean(read / there for read, there in reads)) if reads else ABSENT,
        number_text(median(rates)) if rates else ABSENT,
        mebibytes(mean(held)) if held else ABSENT,
    ]


def write_continuations(record: Record, folder: Path) -> None:
    """continuations.md: under every prompt what each attention wrote."""
    lines = [f"# {title(record)}", ""]
    for number in dict.fromkeys(row.prompt for row in record.continuations):
        rows = [row for row in record.continuations if row.prompt == number]
        end = " ".join(rows[0].prompt_text.split()[-SHOWN_WORDS:])
        lines += [f"## Prompt {number}, {rows[0].prompt_tokens:,} tokens", "", f"> ... {end}", ""]
        for row in rows:
            said = f"failed: {row.error}" if row.error else " ".join(row.text.split())
            cost = "" if row.base_nll is None else f" ({row.base_nll:.2f} nats per token under the base)"
            lines += [f"**{row.attention}**{cost}: {said}", ""]
    replace_file(folder / "continuations.md", "\n".join(lines).encode())
