"""Convert the rows of a finished run's record to measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from focus_exp.config import upgrade_keys
from focus_exp.results.losses import LOSSES, TEXT, Losses, read_losses
from focus_exp.results.measurement import (
    Measurement,
    hard_variant,
    loss_change,
    variant_name,
)

FRACTIONS = ("acc", "exact_match", "em", "f1")  # metrics of a benchmark that are fractions of its items
PRIMARY = ("acc_norm", "acc")


class Row(dict[str, Any]):
    """A part of a record; what an older record lacks is None."""

    def __missing__(self, key: str) -> None:
        return None


def convert_run(folder: Path) -> list[Measurement]:
    """Return the measurements of the run in `folder`."""
    values = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    record: Row = parse_record(values | {"config": upgrade_keys(values["config"])})
    losses = read_losses(folder / LOSSES).get(TEXT)
    converted = [
        *(m for row in record["rows"] or () for m in _quality(record, row, losses)),
        *(m for row in record["phases"] or () for m in _quality(record, row, losses)),
        *_benchmarks(record),
        *_routing(record),
        *_fits(record),
        *(
            Measurement(
                variant="lr_trial", metric="validation_nll", value=row["nll"], unit="nats",
                settings={"learning_rate": row["learning_rate"], "error": row["error"]},
            )
            for row in record["tries"] or ()
        ),
        *_analysis(record["groups"]),
        *_generation(record),
    ]  # fmt: skip
    return [Measurement(**{**vars(m), "seed": record["seed"]}) for m in converted]


def parse_record(value: Any) -> Any:
    """Return a record or a part of it with `Row` for every dict and floats for the strings "nan", "inf", "-inf"."""
    if isinstance(value, dict):
        return Row((key, parse_record(item)) for key, item in value.items())
    if isinstance(value, list):
        return [parse_record(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def _quality(record: Row, row: Row, losses: Losses | None) -> Iterator[Measurement]:
    variant, units = variant_name(row["name"]), record["units"] or {}
    described = {
        "kind": {"twin": "causal_counterpart"}.get(row["kind"], row["kind"]), "method": row["method"],
        "top_k": row["top_k"], "pair_rule": row["pair_rule"], "window": row["window"], "path": row["path"],
        "phase": row["phase"], "causal": None if row["causal"] is not False else False, "error": row["error"],
    }  # fmt: skip
    if row["kind"] not in ("base", "control"):
        phases = (record["config"]["recipe"] or Row())["phases"] or Row()
        last: Row = next(reversed(phases.values()), Row())
        described["trainable"] = phases.get(row["phase"], last)["trainable"] or row["phase"]
    density = 1.0 if row["kind"] in ("base", "trained") else _complement(row["pairs_removed"])
    common: dict[str, Any] = {"variant": variant, "density": density, "settings": described}
    count, dof = units.get("count"), {**described, "dof": units.get("freedom")}
    memberships = (row["top_k"] or 1) if row["pair_rule"] == "share" else 1
    largest = None if row["largest_group"] is None else min(1.0, row["largest_group"] * memberships)
    yield Measurement(
        metric="perplexity",
        value=row["perplexity"],
        low=row["perplexity_low"],
        high=row["perplexity_high"],
        n=count,
        **common | {"settings": dof},
    )
    if row["error"]:
        return
    yield Measurement(metric="nll", value=row["nll"], unit="nats", n=count, **common)
    changes = [] if row["kind"] == "base" else [("base", row["delta_nll"], row["delta_low"], row["delta_high"])]
    if row["delta_vs_hard"] is not None:
        reference = _causal_reference(record, row) if row["kind"] == "twin" else _configured_variant(record)
        changes.append((reference, *(row[f"delta_vs_hard{end}"] for end in ("", "_low", "_high"))))
    if row["kind"] == "hard" and (soft := _soft_row(record, row)) and None not in (row["nll"], soft["nll"]):
        changes.append((variant_name(soft["name"]), row["nll"] - soft["nll"], *_paired_bounds(losses, row, soft)))
    for reference, value, low, high in changes:
        if value is not None:
            yield from loss_change(variant, reference, (value, low, high), n=count, density=density, settings=dof)
    for metric, value, unit in (
        ("perplexity_inside_window", row["perplexity_inside_window"], ""),
        ("perplexity_beyond_window", row["perplexity_beyond_window"], ""),
        ("distant_density", row["distant_pairs_kept"], "fraction"),
        ("largest_group_fraction", largest, "fraction"),
        ("eval_tokens", row["tokens"], "tokens"),
        ("eval_seconds", row["seconds"], "s"),
    ):
        if value is not None:
            yield Measurement(metric=metric, value=value, unit=unit, **common | {"settings": {"phase": row["phase"]}})
    for bin_ in row["by_position"] or ():
        yield Measurement(
            variant=variant, metric="nll_at_position", value=bin_["nll"], unit="nats", n=bin_["tokens"],
            settings={"position_start": bin_["start"], "position_end": bin_["end"], "phase": row["phase"]},
        )  # fmt: skip


def _soft_row(record: Row, row: Row) -> Row | None:
    rows = record["phases"] if row["phase"] else record["rows"]
    same = [
        other for other in rows if other["kind"] == "soft" and other["phase"] == row["phase"] and not other["error"]
    ]
    return same[0] if same else None


def _paired_bounds(losses: Losses | None, row: Row, other: Row) -> tuple[float | None, float | None]:
    names = [
        f"{variant_name(one['name'])}, after {one['phase']}" if one["phase"] else variant_name(one["name"])
        for one in (row, other)
    ]
    if losses is None or not set(names) <= losses.nll.keys():
        return None, None
    return losses.difference(names[0], losses, names[1]).bounds


def _configured_variant(record: Row) -> str:
    attention = record["config"]["attention"]
    return hard_variant(attention["method"], attention.get("top_k"), attention.get("pair_rule"))


def _causal_reference(record: Row, row: Row) -> str:
    method = record["config"]["attention"]["method"]
    return f"{method}_soft" if row["top_k"] is None else hard_variant(method, row["top_k"], row["pair_rule"])


def _benchmarks(record: Row) -> Iterator[Measurement]:
    scored = [row for row in record["benchmarks"] or () if row["error"] is None and row["value"] is not None]
    primary, deciding = (_first_of_each(scored, rank) for rank in (_primary_rank, _deciding_rank))
    for row in record["benchmarks"] or ():
        variant, task, metric = variant_name(row["attention"]) or "base", row["task"], row["metric"]
        is_perplexity = metric.endswith("perplexity")
        is_fraction = metric.split(" ")[0].split("_norm")[0] in FRACTIONS
        unit = "fraction" if is_fraction else "" if is_perplexity else metric
        density = 1.0 if row["kind"] in ("base", "trained") else _complement(row["pairs_removed"])
        described = {
            "kind": row["kind"], "method": row["method"], "task": task, "lm_eval_metric": metric or None,
            "task_version": row["version"] or None, "num_fewshot": row["shots"], "source": row["source"] or None,
            "causal": None if row["causal"] is not False else False, "error": row["error"], "stderr": row["stderr"],
            "higher_is_better": None if row["higher_is_better"] is not False else False,
            "seq_len": int(task.removeprefix("perplexity@")) if task.startswith("perplexity@") else None,
            "primary_metric": True if id(row) in primary else None,
            "deciding_metric": True if id(row) in deciding else None,
        }  # fmt: skip
        name = task if metric and task.startswith(metric) else f"{metric or 'score'}:{task}"
        common: dict[str, Any] = {"variant": variant, "n": row["n"], "density": density}
        yield Measurement(metric=name, value=row["value"], unit=unit, settings=described, **common)
        if row["difference"] is not None:
            bounds = row["difference"], row["difference_low"], row["difference_high"]
            # older records do not say: intervals of fractions were normal, others Student's t over items
            dof = row["freedom"] or (None if is_fraction or not row["n"] else row["n"] - 1)
            settings = described | {"dof": dof, "stderr": None}
            suffix = name.removeprefix(metric) if is_perplexity else f":{task}"
            if is_perplexity:
                yield from loss_change(reference="base", bounds=bounds, suffix=suffix, settings=settings, **common)
            else:
                yield Measurement(
                    metric=f"{metric}_change{suffix}", value=bounds[0], low=bounds[1], high=bounds[2], reference="base",
                    unit=unit, settings=settings, **common,
                )  # fmt: skip
        if id(row) in primary:
            yield from _requests(row, variant, density)


def _requests(row: Row, variant: str, density: float | None) -> Iterator[Measurement]:
    """Yield what the mask did on the requests of a task."""
    task = row["task"]
    largest = None if row["largest_group"] is None else min(1.0, row["largest_group"] * (row["memberships"] or 1))
    by_layer = row["removed_by_layer"] or ()
    quantiles = dict(zip(("min", "p10", "median", "p90", "max"), row["request_tokens"] or (), strict=False))
    ledger: list[tuple[str, Any, str, dict[str, Any]]] = [
        ("requests", row["requests"], "", {}),
        ("truncated_requests", row["truncated"], "", {}),
        *(("request_tokens", tokens, "tokens", {"quantile": name}) for name, tokens in quantiles.items()),
        ("distant_fraction", row["distant_share"], "fraction", {}),
        ("distant_density", row["distant_pairs_kept"], "fraction", {}),
        ("largest_group_fraction", largest, "fraction", {}),
        ("eval_seconds", row["seconds"], "s", {}),
        *(("sparsity_at_layer", value, "fraction", {"layer": layer}) for layer, value in enumerate(by_layer)),
    ]
    for metric, value, unit, at in ledger:
        if value is not None:
            settings = {"task": task, **at}
            yield Measurement(
                variant=variant, metric=f"{metric}:{task}", value=value, unit=unit, density=density, settings=settings
            )


def _first_of_each(rows: list[Row], rank: Any) -> set[int]:
    chosen = {(row["task"], row["attention"]): id(row) for row in reversed(sorted(rows, key=rank))}
    return set(chosen.values())


def _primary_rank(row: Row) -> int:
    return PRIMARY.index(row["metric"]) if row["metric"] in PRIMARY else len(PRIMARY)


def _deciding_rank(row: Row) -> tuple[int, int]:
    """Rank a metric that got worse first, then one that got better, then the primary one."""
    low, high = row["difference_low"], row["difference_high"]
    if low is None or high is None:
        outcome = 3
    elif low <= 0 <= high:
        outcome = 2
    else:
        outcome = 1 if (high > 0) == row["higher_is_better"] else 0
    return outcome, _primary_rank(row)


def _routing(record: Row) -> Iterator[Measurement]:
    phases = (record["config"]["recipe"] or Row())["phases"] or {}
    layers = record["layers"] or []
    for index, sizes in enumerate(record["group_shares"] or []):
        layer = layers[index] if index < len(layers) else index
        for group, fraction in enumerate(sizes):
            yield Measurement(
                variant="router", metric="group_fraction", value=fraction, unit="fraction",
                settings={"layer": layer, "group": group},
            )  # fmt: skip
    for probe in record["probes"] or ():
        settings = {
            "phase": probe["phase"],
            "step": probe["step"],
            "trainable": phases.get(probe["phase"], Row())["trainable"] or probe["phase"],
        }
        for metric, key, unit in (
            ("dominance", "dominance", "fraction"),
            ("dominance_worst", "dominance_worst", "fraction"),
            ("dead_groups", "dead_groups", "groups"),
            ("dead_groups_worst", "dead_groups_worst", "groups"),
            ("confidence", "confidence", "fraction"),
            ("assignment_entropy", "entropy", "nats"),
            ("assignment_overlap", "stability", "fraction"),
            ("assignment_overlap_renamed", "stability_renamed", "fraction"),
        ):
            if probe[key] is not None:
                yield Measurement(variant="router", metric=metric, value=probe[key], unit=unit, settings=settings)


def _fits(record: Row) -> Iterator[Measurement]:
    for row in record["fits"] or ():
        common: dict[str, Any] = {"variant": "focus_dual"}
        settings = {"layer": row["layer"]}
        for metric, key, unit in (
            ("distant_density_fit", "pairs", "fraction"),
            ("importance_lost_fraction", "lost", "fraction"),
            ("importance_lost_fraction_bound", "least", "fraction"),
            ("importance", "importance", "nats^2"),
        ):
            yield Measurement(metric=metric, value=row[key], unit=unit, settings=settings, **common)
        for head, groups in enumerate(row["reads"]):
            at = {**settings, "head": head}
            yield Measurement(metric="groups_per_query", value=groups, unit="groups", settings=at, **common)


def _analysis(report: Row | None) -> Iterator[Measurement]:
    """Yield the analysis of the groups of a router, by layer (and key/value head)."""
    if report is None:
        return
    facts = {key: report[key] for key in ("tokens", "windows", "passage_tokens", "passage_from", "tagger", "others")}

    def make(metric: str, value: float | None, unit: str = "fraction", variant: str = "router", **settings: Any) -> Any:
        return Measurement(variant=variant, metric=metric, value=value, unit=unit, settings=settings)

    yield make("analyzed_tokens", report["tokens"], "tokens", **facts)
    for name, fraction in report["class_shares"].items():
        yield make("word_class_fraction", fraction, variant="text", word_class=name)
    for row in report["layers"]:
        at = {"layer": row["layer"], "head": row["head"]}
        yield make("layer_confidence", row["confidence"], **at)
        for group in row["groups"]:
            own = at | {"group": group["name"], "word_class": group["word_class"]}
            yield make("group_fraction", group["share"], **own, tokens=group["tokens"])
            for metric, key in (("confidence", "confidence"), ("purity", "purity"), ("class_fraction", "class_share")):
                yield make(f"group_{metric}", group[key], **own)
        for fit in row["fits"]:
            for metric in ("purity", "nmi", "ami"):
                yield make(metric, fit[metric], **at, router=fit["router"])
        for other, value in enumerate(row["agreement"] or ()):
            yield make("router_agreement", value, "ami", **at, router=f"trained_{other}")
        for name in ("untrained", "chance"):
            yield make("router_agreement", row[f"agreement_{name}"], "ami", **at, router=name)
        yield make("passage_distant_density", row["distant_pairs_kept"], **at)
        for where in ("near", "kept", "cut"):
            yield make("attention_mass", row[f"{where}_mass"], **at, pairs=where)
        yield make("cut_key_fraction", row["cut_key_share"], **at, key=row["cut_key"], key_word=row["cut_key_word"])
        yield make("pair_affinity_median", row["affinity_median"], "", **at)
        for pair in row["pairs"]:
            own = at | {key: pair[key] for key in ("query", "key", "query_word", "key_word", "by")}
            yield make("pair_affinity", pair["affinity"], "", **own)
            yield make("pair_attention_mass", pair["mass"], **own)
    for row in report["costs"]:
        own = {"word_class": row["word_class"]}
        for variant, key in (("base", "nll_full"), ("focus_hard", "nll_hard")):
            yield Measurement(
                variant=variant, metric="class_nll", value=row[key], unit="nats", n=row["tokens"], settings=own
            )
        yield Measurement(
            variant="focus_hard", metric="class_nll_change", value=row["delta"], low=row["delta_low"],
            high=row["delta_high"], reference="base", unit="nats", n=row["tokens"], settings=own,
        )  # fmt: skip
    yield make("cut_cost_correlation", report["cut_cost"], "rank correlation")


def _generation(record: Row) -> Iterator[Measurement]:
    for row in record["continuations"] or ():
        settings = {key: row[key] for key in ("prompt", "prompt_tokens", "kind", "top_k", "error")}
        variant = "text" if row["kind"] == "book" else variant_name(row["attention"])
        for metric, key, unit in (
            ("generated_tokens", "tokens", "tokens"),
            ("continuation_nll", "base_nll", "nats"),
            ("agreeing_tokens", "agrees", "tokens"),
            ("generation_seconds", "seconds", "s"),
            ("keys_read", "read", "tokens"),
            ("cache_bytes", "cache_bytes", "bytes"),
        ):
            if row[key] is not None:
                yield Measurement(variant=variant, metric=metric, value=row[key], unit=unit, settings=settings)


def _complement(fraction: float | None) -> float | None:
    return None if fraction is None else 1 - fraction
