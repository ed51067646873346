"""A comparison is a view of its variants' runs: the rows that represent each, and their paired changes of the loss."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from focus_exp.reporting.frame import BASE, Row, matches, read_yaml
from focus_exp.results.losses import TEXT
from focus_exp.results.record import Record


def join_variants(runs: Mapping[str, Record], rows: Mapping[str, list[Any]]) -> list[Any]:
    """Return the rows of a comparison: of the base and of each variant its primary ones, or all next to controls.

    Args:
        rows: by variant, of its run.
    """
    base: list[Any] = []
    joined: list[Any] = []
    for name, run in runs.items():
        own = rows[name]
        setup, trained = run.setup or run.config_hash, trained_parameters(run)
        facts = {"variant": name, "variant_setup": setup, "trainable_params": trained}
        if not base and any(row.kind == BASE and row.source == "rows" for row in own):
            base = [row for row in own if row.kind == BASE and row.source in ("rows", "benchmarks")]
        primary = next((r for r in own if r.primary and r.source == "rows" and r.metric == "perplexity"), Row())
        shown = own if run.setting("eval", "controls") else [row for row in own if represents(row, primary)]
        for row in shown:
            if row.kind != BASE:
                reference = name if primary.name and row.reference == primary.name else row.reference
                joined.append(row._replace(**facts, reference=reference))
    return [*(row._replace(variant=None) for row in base), *joined]


def represents(row: Any, primary: Any) -> bool:
    """Return whether a row of a variant's run is one of its comparison."""
    if row.source == "rows":
        return row.subject == primary.subject and row.reference in (None, BASE)
    if row.source == "benchmarks":
        return row.kind == primary.kind and (row.kind != "control" or row.method == primary.method)
    return row.source in ("phases", "probes")


def trained_parameters(record: Record) -> int:
    """Return the number of parameters that a run trained."""
    return int(record.method.get("trainable_parameters") or 0) if record.tokens_seen else 0


def pair_variants(record: Record, runs: Mapping[str, Record], rows: Iterable[Any]) -> list[Any]:
    """Return the paired changes of the loss between variants, each in both directions.

    Variants that scored the same tokens are paired with the first of them, with `references`, and as in claims.yaml.
    """
    levels = {row.variant: row for row in rows if row.source == "rows" and row.metric == "perplexity" and row.primary}
    scored = {name: run for name, run in runs.items() if name in levels and TEXT in run.losses}
    tokens = {name: scored_tokens(run) for name, run in scored.items()}
    firsts = {tokens[name]: name for name in reversed(scored)}
    references = [name for name in scored if name == firsts[tokens[name]]] + (record.config.get("references") or [])
    pairs = [(name, other) for other in references for name in scored]
    paired: dict[frozenset[str], list[Any]] = {}
    for pair in [*pairs, *claimed_pairs(record.experiment, [*scored])]:
        name, other = pair
        if name != other and tokens[name] == tokens.get(other):
            change = pair_runs(levels, scored, name, other)
            reverse = pair_runs(levels, scored, other, name)._replace(reversed=True)
            paired.setdefault(frozenset(pair), [change, reverse])
    return [row for both in paired.values() for row in both]


def scored_tokens(run: Record) -> Hashable:
    """Return what runs must share for their losses to be of the same tokens."""
    settings = (run.setting("eval", key) for key in ("seq_len", "max_sequences", "split"))
    inputs = ((part.get("used"), part.get("fingerprint")) for part in (run.model, run.data))
    return (*settings, *inputs, *run.losses[TEXT].units)


def claimed_pairs(experiment: str, variants: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of variants that claims.yaml compares."""
    wanted = [
        claim["select"] | own
        for claim in read_yaml("claims")
        for own in (dict[str, Any](), claim.get("own", {}))
        if experiment in claim["experiments"] and {"variant", "reference"} <= claim["select"].keys()
    ]
    return [
        (name, other)
        for other in sorted(variants)
        for name in variants
        if any(matches(name, cells["variant"]) and matches(other, cells["reference"]) for cells in wanted)
    ]


def pair_runs(levels: Mapping[str, Any], runs: Mapping[str, Record], name: str, reference: str) -> Any:
    """Return the row of a variant's change of the loss from another one, paired by sequence.

    Args:
        levels: rows of the perplexities.
    """
    row, other = levels[name], levels[reference]
    losses, run, against = runs[name].losses[TEXT], runs[name], runs[reference]
    change = losses.difference(run.primary_variant, against.losses[TEXT], against.primary_variant)
    low, high = change.bounds
    paired = row._replace(metric="nll_change", unit="nats", value=change.value, low=low, high=high)
    paired = paired._replace(stderr=change.stderr, dof=change.freedom, n_units=losses.unit_count, level=row.value)
    paired = paired._replace(reference=reference, reference_level=other.value, reference_causal=other.causal)
    return paired._replace(
        reference_setup=other.variant_setup,
        size_ratio=row.trainable_params / other.trainable_params if other.trainable_params else None,
        same_prefix=name.rpartition("_")[0] == reference.removesuffix("_full"),
    )
