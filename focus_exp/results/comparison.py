"""Paired changes of the loss between the variants of a comparison."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from focus_exp.results.losses import TEXT, Losses
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record


def compare_variants(record: Record, runs: Mapping[str, Record], references: list[str]) -> None:
    """Append each variant's paired changes from the first one on the same text and from `references`.

    Model and data are those of the first variant that scored its base.

    Args:
        runs: by variant; one that is missing has no changes.
    """
    scored: dict[str, tuple[Losses, str, Hashable]] = {}  # losses, the variant's name in them, what was scored
    first: dict[Hashable, str] = {}
    for variant in record.variants:
        run = runs.get(variant.name)
        if run is None:
            continue
        if not record.model and run.find("nll", variant="base") is not None:
            record.model, record.data = run.model, run.data
        losses = run.losses.get(TEXT)
        if losses is not None and run.primary_variant in losses.nll:
            scored[variant.name] = losses, run.primary_variant, _scored_tokens(run)
            first.setdefault(_scored_tokens(run), variant.name)
    for reference in dict.fromkeys([*first.values(), *(name for name in references if name in scored)]):
        other, other_name, tokens = scored[reference]
        for name, (losses, own_name, own_tokens) in scored.items():
            if name != reference and own_tokens == tokens and losses.units == other.units:
                change = losses.difference(own_name, other, other_name)
                low, high = change.bounds
                record.measurements.append(
                    Measurement(
                        variant=name, reference=reference, metric="nll_change", value=change.value, low=low, high=high,
                        unit="nats", n=losses.unit_count, settings={"dof": change.freedom},
                    )
                )  # fmt: skip


def _scored_tokens(run: Record) -> Hashable:
    """Return what runs must share for their losses to be of the same tokens."""
    settings = (run.setting("eval", key) for key in ("seq_len", "max_sequences", "split"))
    return (*settings, *((part.get("used"), part.get("fingerprint")) for part in (run.model, run.data)))
