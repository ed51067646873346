"""Paired changes of the loss between the variants of a comparison."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from focus_exp.results.losses import LOSSES, TEXT, Losses, read_losses
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import RECORD, Record, VariantRun


def variant_folder(folder: Path, variant: VariantRun) -> Path:
    """Return the directory of a variant's run, wherever its experiment was moved."""
    experiment = folder.parent.parent
    path = experiment.joinpath(*Path(variant.folder).parts[-2:])
    if path.exists() or not variant.config_hash:
        return path
    return next((path.parent for path in experiment.glob(f"*/*{variant.config_hash}/{RECORD}")), path)


def load_variant(folder: Path, variant: VariantRun) -> Record | None:
    """Load the record of a variant of the comparison in `folder`; None if it is gone or was repeated since."""
    path = variant_folder(folder, variant) / RECORD
    record = Record.load(path) if path.exists() else None
    return record if record and is_run_of(record, variant) else None


def is_run_of(record: Record, variant: VariantRun) -> bool:
    """Return whether a comparison read this record of its variant, which was not repeated since."""
    return record.started == variant.started


def compare_variants(record: Record, folder: Path, references: list[str]) -> None:
    """Append each variant's paired changes from the first one on the same text and from `references`.

    Model and data are those of the first variant that scored its base.
    """
    scored: dict[str, tuple[Losses, str, Hashable]] = {}  # losses, the variant's name in them, what was scored
    first: dict[Hashable, str] = {}
    for variant in record.variants:
        run = load_variant(folder, variant)
        if run is None:
            continue
        if not record.model and run.find("nll", variant="base") is not None:
            record.model, record.data = run.model, run.data
        losses = read_losses(variant_folder(folder, variant) / LOSSES).get(TEXT)
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
