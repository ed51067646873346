"""What expressions of tables.yaml may call beside the texts of numbers: what has a line, and what stands in cells."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from math import isclose
from statistics import mean, median
from typing import Any

from focus_exp.records.answers import Phase, row_of
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.groups import PUNCTUATION, DistantPair, GroupLayer
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.records.speed import MethodSpeedRow, SpeedRow
from focus_exp.reporting.formats import ABSENT, FAILED, distinct_text, mebibytes_text, number_text, share_text
from focus_exp.reporting.paper import paper_rows, paper_speedups, paper_tables
from focus_exp.reporting.speed import by_top_k, quality_row, setting

PHASES_IN_PAPER = ("table8_dominance.two_phase_K8", "table8_dominance", "table9_ablation")
PAPER_GROUPS = 4  # K of every row of the paper's table 7
# of a row, in a CSV
PHASE_VALUES = ("perplexity", "perplexity_low", "perplexity_high", "nll", "delta_nll", "largest_group", "causal")
CASE_VALUES = (
    "clock", "tokens", "groups", "assignment", "top_k", "pair_rule", "window", "dtype", "pairs_kept", "bound",
    "pairs_computed", "kernel_bound",
)  # fmt: skip
TIMED_VALUES = (
    "largest_group", "full_kernel", "path", "repeats", "full_seconds", "focus_seconds", "ratio",
    "full_attention_seconds", "focus_attention_seconds", "full_peak_bytes", "focus_peak_bytes", "full_bytes_read",
    "focus_bytes_read", "error",
)  # fmt: skip


def grouped(rows: Iterable[Any], *names: str) -> list[list[Any]]:
    """Rows that are equal in these attributes, in the order of their first ones."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(found.values())


def known(rows: Iterable[Any], name: str) -> list[Any]:
    """An attribute of the rows, where there is one."""
    return [value for row in rows if (value := getattr(row, name)) is not None]


def average(rows: Iterable[Any], name: str) -> float | None:
    values = known(rows, name)
    return mean(values) if values else None


def middle(rows: Iterable[Any], name: str) -> float | None:
    values = known(rows, name)
    return median(values) if values else None


def base_and_arms(record: Record) -> list[tuple[Arm, Row]]:
    """Full attention without any training, then the arms."""
    base = replace(
        record.base or _unscored(), name="full attention", distant_pairs_kept=1.0, pairs_removed=0.0, delta_vs_hard=None
    )
    return [(Arm(name="base", settings=[]), base), *arms(record)] if record.arms else []


def arms(record: Record) -> list[tuple[Arm, Row]]:
    """Every arm with the row that stands for it, one without numbers where there is none."""
    return [(arm, row_of(record, arm.name) or _unscored()) for arm in record.arms]


def _unscored() -> Row:
    return Row(name="", kind="control", method="", causal=True)


def by_task(rows: list[BenchmarkRow]) -> list[BenchmarkRow]:
    """Tasks and metrics together, full attention first."""
    tasks, metrics = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("task", "metric"))
    return sorted(rows, key=lambda row: (tasks.index(row.task), metrics.index(row.metric)))


def paper_of(record: Record, phase: Phase) -> str:
    """What the paper prints of this arm after such a phase; "" for nothing."""
    full = phase.trains == "all"
    suffix, perplexity = ("full_ft", "ppl_finetuned") if full else ("centroid", "ppl_centroid")
    texts = {perplexity: "perplexity {}", f"dominance_{suffix}": "largest group {} %"}
    texts |= {f"stability_{suffix}": "stability {}"} | ({"outcome": "{}"} if full else {})
    tables = PHASES_IN_PAPER if record.experiment in ("stability", "ablation") else ()
    rows = (paper_row_of(phase.arm.name, table) for table in tables)
    return ", ".join(text.format(row[name]) for row in rows for name, text in texts.items() if name in row)


def paper_row_of(arm: str, name: str) -> dict[str, Any]:
    """The first row of a table of the paper that an arm stands for by itself, {} if there is none."""
    table = paper_tables()[name]
    return next((row for key, row in table.paper.items() if table.places(key)[0].arm == arm), {})


def paper_ratio(row: SpeedRow) -> float | None:
    """The paper's, at that length and K, of one group a query."""
    return paper_speedups(row.groups).get(row.tokens) if row.top_k == 1 else None


def by_groups_a_query(record: Record) -> Iterator[dict[str, Any]]:
    """The time of some groups a query, what they cost in perplexity, and what the paper says of both."""
    printed: list[dict[str, Any]] = paper_rows("table7_topk")
    for row in by_top_k(record):
        wanted = ("gpt2_124m", row.top_k, row.groups)
        paper = next((line for line in printed if (line["model"], line["top_k"], PAPER_GROUPS) == wanted), {})
        retained = percent / 100 if (percent := paper.get("pairs_retained_percent")) else None
        quality = quality_row(record, setting(row))
        yield {"case": row, "rows": [row], "quality": quality, "paper": paper, "retained": retained}


def alone_and_together(layers: list[GroupLayer]) -> list[list[GroupLayer]]:
    """A line a layer, then one of all, whose numbers are means."""
    return [*([layer] for layer in layers), layers] if layers else []


def members(layers: Iterable[GroupLayer], name: str) -> list[tuple[GroupLayer, Any]]:
    """The groups or the pairs of all layers, each with its layer."""
    return [(layer, member) for layer in layers for member in getattr(layer, name)]


def section5(record: Record) -> Iterator[dict[str, Any]]:
    """Every number of the paper's section 5 beside ours, `value` unrounded."""
    report = record.groups
    if report is None or record.setting("attention", "temperature") is None:  # of a router that the paper does not have
        return
    paper = {str(row["quantity"]): row["value"] for row in paper_rows("groups_section5")}
    marks = report.punctuation
    purities = [group.purity or 0.0 for _, group in marks]
    yield {
        "quantity": "purity of the punctuation group",
        "paper": f"{paper['punctuation_purity_percent']} %",
        "here": f"{share_text(max(purities))} at best, {share_text(mean(purities))} on average" if marks else ABSENT,
        "value": max(purities, default=None),
        "read": f"{len(marks)} groups in {len({row.layer for row, _ in marks})} of {len(report.layers)} layers have it "
        f"as most frequent class; it is {share_text(report.class_shares.get(PUNCTUATION, 0.0))} of the text",
    }
    confidences = [row.confidence for row in report.layers]
    yield {
        "quantity": "mean confidence",
        "paper": paper["mean_confidence"],
        "here": f"{mean(confidences):.2f}, by layer {min(confidences):.2f} to {max(confidences):.2f}",
        "value": mean(confidences),
        "read": f"temperature {record.setting('attention', 'temperature')} on "
        f"{'cosines' if record.setting('attention', 'normalize') else 'products'} here, 0.1 there",
    }
    shares = [share for row in report.layers for share in row.shares]
    yield {
        "quantity": "share of tokens in a group",
        "paper": f"{paper['smallest_group_percent']} to {paper['largest_group_percent']} %",
        "here": f"{share_text(min(shares))} to {share_text(max(shares))}",
        "value": max(shares),
        "read": f"K = {record.setting('attention', 'groups')} here, 8 there; all layers",
    }
    medians = known(report.layers, "affinity_median")
    printed: list[dict[str, Any]] = paper_rows("groups_section5.pairs")
    for pair in printed:
        words = f"'{pair['word']}'({pair['position']}) and '{pair['other_word']}'({pair['other_position']})"
        above = sum(median >= pair["affinity"] for median in medians)
        yield {
            "quantity": "affinity of a long-range pair",
            "paper": f"{words}: {pair['affinity']}",
            "here": f"{mean(medians):.3f} is the median of all kept distant pairs" if medians else ABSENT,
            "value": mean(medians) if medians else None,
            "read": f"in {above} of {len(medians)} layers at least half of all kept distant pairs have as much",
        }


def mark(word: str, holds: bool = True) -> str:
    """What has to be said with a number."""
    return f" ({word})" if holds else ""


def of(row: Any, name: str) -> Any:
    """An attribute of a row that may lack."""
    return getattr(row, name, None)


def time(row: SpeedRow | None, name: str, factor: float = 1e3) -> str:
    """Seconds of a row, in ms."""
    if row is None or row.error is not None:
        return ABSENT if row is None else FAILED
    seconds = getattr(row, name)
    return number_text(None if seconds is None else factor * seconds)


def rate(row: SpeedRow | None, name: str) -> str:
    """Tokens a second."""
    seconds = getattr(row, name, None)
    return number_text(1 / seconds if seconds else None)


def part(some: float | None, whole: float | None) -> str:
    return share_text(some / whole if some is not None and whole else None)


def beside(row: SpeedRow | None, name: str) -> str:
    """Bytes of Focus over those of full attention, then both in MiB."""
    focus, full = getattr(row, f"focus_{name}", None), getattr(row, f"full_{name}", None)
    if not full or focus is None:
        return ABSENT
    return f"{number_text(focus / full)} ({mebibytes_text(focus)} / {mebibytes_text(full)})"


def kept(share: float | None) -> str:
    """A share of pairs; all of them are full attention."""
    return share_text(share) + mark("full attention", share is not None and isclose(share, 1.0))


def first_pair(row: GroupLayer, by: str) -> DistantPair | None:
    """The first of the layer's pairs by this measure."""
    return next((pair for pair in row.pairs if pair.by == by), None)


def pair_words(pair: DistantPair | None) -> str:
    return f"'{pair.query_word}' ({pair.query}) from '{pair.key_word}' ({pair.key})" if pair else ABSENT


def fit_means(layers: list[GroupLayer], measure: str) -> list[float]:
    """A measure of the trained router, of an untrained one and by chance, means over the layers."""
    return [mean(getattr(row.fit(router), measure) for row in layers) for router in ("trained", "untrained", "chance")]


def fits(layers: list[GroupLayer], measure: str, text: Callable[..., str], *settings: Any) -> str:
    """The same in words, the trained router's first."""
    trained, *others = (text(value, *settings) for value in fit_means(layers, measure))
    return trained + mark(", ".join(others))


def conditions(rows: list[SpeedRow] | list[MethodSpeedRow]) -> dict[str, str]:
    """On what and how often `rows` were measured."""
    told = {"layer": "layer", "dtype": "dtype", "full_kernel": "full attention by", "repeats": "repeats"}
    return {name: distinct_text(getattr(row, key) or "" for row in rows) for key, name in told.items()}


def fields(row: Any, *without: str) -> dict[str, Any]:
    """All fields of a row, lists as words."""
    values = {name: value for name, value in asdict(row).items() if name not in without}
    return {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in values.items()}


def picked(row: Any, *names: str) -> dict[str, Any]:
    """These attributes of a row, or entries of a section of a config, None where it lacks."""
    return {name: row.get(name) if isinstance(row, dict) else getattr(row, name, None) for name in names}


def prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def fit_values(row: GroupLayer) -> dict[str, Any]:
    return {f"{name}_{fit.router}": getattr(fit, name) for fit in row.fits for name in ("purity", "nmi", "ami")}
