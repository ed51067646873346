"""Every text of a number, and the words of the report, each once."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from focus_exp.records.benchmarks import BenchmarkRow

ABSENT = "-"
FAILED = "failed"
READS_FUTURE = "reads the future"
# from where on the perplexity of a benchmark is written with an exponent
MANY = 100_000
# nats a token: the same function computed along two paths differs by less
ROUNDING = 1e-6


class Word(str):
    """A word of a closed vocabulary; a page colours the cell that is one by its `kind`."""

    @property
    def kind(self) -> str:
        return self.replace(" ", "-")


REPRODUCED, SAME_DIRECTION, NOT_REPRODUCED = map(Word, ("reproduced", "same direction", "not reproduced"))
UNDECIDED, OTHER_METHOD, NOT_ENGAGED = map(Word, ("too little to decide", "another method", "not engaged"))
NOT_RUN, NOT_HERE = map(Word, ("not run", "not testable"))
RAN = Word("ran, decides nothing")  # at scale=quick
# word -> what it means, in the order of the ledger's counts
VERDICTS = {
    RAN: "at scale=quick, which shows that everything runs; no number of it means anything",
    REPRODUCED: "the whole interval, or every timing, is on the claim's side, and a size that is claimed is in it, "
    "without twice that size: so wide an interval holds it by its width",
    SAME_DIRECTION: "the whole interval is on the claim's side, but the size is another one or open, or the kind of "
    "machine is another one",
    NOT_REPRODUCED: "the whole interval is on the other side",
    UNDECIDED: "the interval includes the limit, or the run ended too early; needs: how much more it takes",
    OTHER_METHOD: "a sentence on the router itself, what it costs, or pairs, measured on this project's router or by "
    "its rule for pairs; where Focus is compared with something it is this project's, which reads no future token",
    NOT_ENGAGED: "the mask removed under 5 % of the pairs, so equal scores say nothing",
    NOT_RUN: "there is no record yet",
    NOT_HERE: "it takes a model, data or a machine that are not here, or what was measured is no perplexity",
}


def count_text(value: float | None) -> str:
    """A whole number."""
    return ABSENT if value is None else f"{value:,.0f}"


def decimals_text(value: float | None, decimals: int) -> str:
    return ABSENT if value is None else f"{value:,.{decimals}f}"


def signed_text(value: float) -> str:
    return f"{value:+.2f}"


def number_text(value: float | None) -> str:
    """Three significant digits, more for whole numbers."""
    if value is None:
        return ABSENT
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}" if abs(value) >= 0.9995 else f"{value:.3g}"


def about_text(value: float) -> str:
    """Two significant digits."""
    return f"{float(f'{value:.1e}'):,.0f}"


def mebibytes_text(size: float | None) -> str:
    """Bytes in MiB, without the unit."""
    return number_text(None if size is None else size / 2**20)


def milliseconds_text(seconds: float | None) -> str:
    """Seconds in ms, without the unit."""
    return number_text(None if seconds is None else 1e3 * seconds)


def share_text(share: float | None) -> str:
    """A share 0..1 in per cent."""
    return ABSENT if share is None else f"{100 * share:.1f} %"


def perplexity_text(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Two decimals below 1000, none above; with its interval."""
    text = ABSENT if value is None else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return text if low is None or high is None else f"{text} [{perplexity_text(low)}, {perplexity_text(high)}]"


def change_text(delta: float | None, low: float | None = None, high: float | None = None) -> str:
    """A difference of losses [nats per token] as a change of perplexity in per cent, with its interval."""
    if delta is None:
        return ABSENT
    value, *bounds = (f"{change_percent(bound):+.2f}" for bound in (delta, low, high) if bound is not None)
    return f"{value} % [{', '.join(bounds)}]" if len(bounds) == 2 else f"{value} %"


def change_percent(delta: float) -> float:
    """A difference of losses [nats per token] as a change of perplexity in per cent."""
    return 100 * math.expm1(min(delta, 700.0))


def difference_word(delta: float, low: float | None, high: float | None, words: tuple[str, str]) -> str:
    """`words` for a negative and a positive difference of losses, unless its interval includes 0 or it is rounding."""
    if abs(delta) < ROUNDING or (low is not None and high is not None and low <= 0 <= high):
        return "indistinguishable from"
    return words[0] if delta < 0 else words[1]


def score_text(row: BenchmarkRow) -> str:
    """A score with its standard error, shares in per cent."""
    if row.error is not None:
        return "not measured" if row.kind == "missing" else "failed"
    if row.value is None:
        return ABSENT
    if row.is_share:
        error = "" if row.stderr is None else f" ± {100 * row.stderr:.1f}"
        return f"{100 * row.value:.1f}{error} %"
    return " ± ".join(
        perplexity_text(value) if abs(value) < MANY else f"{value:.1e}"
        for value in (row.value, row.stderr)
        if value is not None
    )


def difference_text(row: BenchmarkRow) -> str:
    """A paired difference of scores with its interval: points, per cent, nats or the metric's own unit."""
    if row.difference is None:
        return ABSENT
    low, high = row.difference_low, row.difference_high
    if row.is_perplexity and max(abs(row.difference), abs(low or 0), abs(high or 0)) < 1:
        return change_text(row.difference, low, high)
    factor, unit = (100, " points") if row.is_share else (1, " nats" if row.is_perplexity else "")
    interval = "" if low is None or high is None else f" [{factor * low:+.1f}, {factor * high:+.1f}]"
    return f"{factor * row.difference:+.1f}{interval}{unit}"


def lengths_text(row: BenchmarkRow) -> str:
    """Tokens of the median request, of the shortest and of the longest; how many were cut."""
    if not row.request_tokens:
        return ABSENT
    least, _, middle, _, most = row.request_tokens
    text = f"{middle:,} ({least:,} to {most:,})" if least < most else f"{most:,}"
    return f"{text}, {row.truncated:,} of {row.requests:,} CUT" if row.truncated else text


def facts_text(values: dict[str, Any]) -> str:
    """The pairs in a line; without what is empty, and without the substitution, which has its own note."""
    known = {key: value for key, value in values.items() if value not in (None, "") and key != "substitution"}
    return ", ".join(f"{key} {_plain(value)}" for key, value in known.items())


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def distinct_text(values: Iterable[Any]) -> str:
    """The different values in order, without empty ones."""
    return " and ".join(sorted({str(value) for value in values} - {""}))


def listed_text(parts: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def seeds_text(seeds: Sequence[int]) -> str:
    """How many, and which."""
    return f"{len(seeds)} ({', '.join(map(str, seeds))})" if seeds else ABSENT


def each_rate_text(rates: int) -> str:
    """How many learning rates the same was trained at."""
    return f"at {rates} learning rates, all of which have to agree" if rates > 1 else rates_text(None)


def rates_text(tries: int | None) -> str:
    """How a learning rate was come by."""
    return f"at the best of {tries} learning rates" if tries else "at one learning rate, not tuned"


def line_text(text: str) -> str:
    """`text` in one line."""
    return " ".join(text.split())


def commit_text(commit: str | None) -> str:
    """A commit's first digits, and whether the code differed from it."""
    digits, dirty, _ = (commit or "no commit").partition("-dirty")
    return (digits[:7] if commit else digits) + dirty


def cell_text(text: str) -> str:
    """`text` as a cell of a Markdown table."""
    return line_text(text).replace("|", "\\|")


def duration_text(seconds: float | None) -> str:
    """40 s, 12 min, 3.4 h."""
    if seconds is None:
        return ABSENT
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
