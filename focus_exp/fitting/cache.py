"""Fit an attached method to the frozen base, each layer alone, from observations of the base's attention.

Runs that differ in their budget only share one cached fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.block_gate import BlockGate
from focus_exp.attention.baselines.key_gate import KeyGate
from focus_exp.attention.baselines.top_tokens import TokenIndexer
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.registry import find
from focus_exp.config import FitConfig
from focus_exp.fitting.baselines import (
    BlockObservation,
    BlockProbe,
    fit_block_gate,
    fit_gate,
    fit_indexer,
    set_threshold,
)
from focus_exp.fitting.encoders import standardize
from focus_exp.fitting.focus_dual import choose_layer_budgets, fit_dual_layer, load_layers
from focus_exp.fitting.importance import (
    ImportanceProbe,
    Observation,
    count_fit_threads,
    fitted_methods,
    load_or_compute,
    map_in_threads,
    read_observations,
    read_seconds,
    record_observations,
)
from focus_exp.models.load import fingerprint, select_numerics
from focus_exp.models.methods import get_attachment
from focus_exp.progress import ProgressBar
from focus_exp.results.measurement import Measurement
from focus_exp.storage import file_lock, remove, remove_stale_temp
from focus_exp.training.precision import Precision

# options of methods that set what is kept of one fit
NOT_FITTED = ("density", "tokens_kept", "top_k", "counts", "groups_per_layer", "gate_steepness")


class Fit(NamedTuple):
    """Fit of the layers of a method.

    Args:
        fit: of a layer to its observations; it may return tensors to cache besides the method's own.
        observation: dataclass of what the probe records on a sequence.
        probe: makes the probe of a layer; None for importance.
    """

    fit: Callable[..., dict[str, Tensor] | None]
    observation: type[Any] = Observation
    probe: Callable[[Any], Any] | None = None


FITS: dict[type[AttentionMethod], Fit] = {
    FocusDual: Fit(fit_dual_layer),
    TokenIndexer: Fit(fit_indexer),
    KeyGate: Fit(fit_gate),
    BlockGate: Fit(fit_block_gate, BlockObservation, BlockProbe),
}


def find_fit(methods: Mapping[int, AttentionMethod]) -> Fit:
    """Return the fit of attached methods, all of one class."""
    method = next(iter(methods.values()))
    return next(fit for base, fit in FITS.items() if isinstance(method, base))


def record(
    model: PreTrainedModel,
    methods: Mapping[int, AttentionMethod],
    sequences: list[Tensor],
    importance: str,
    precision: Precision,
    folder: Path,
) -> list[Path]:
    """Record what the layers are fitted to, in a file of `folder` for each sequence."""
    probe = find_fit(methods).probe or partial(ImportanceProbe, importance=importance)
    return record_observations(model, methods, sequences, precision, folder, probe)


FORMAT = 8  # increase when the same inputs give another fit


def attached_options(model: PreTrainedModel) -> dict[str, Any]:
    """Return all options of the attached method."""
    attachment = get_attachment(model)
    return asdict(find(attachment.method).options(**attachment.options))


@contextmanager
def open_fit(
    model: PreTrainedModel, sequences: list[Tensor], fit: FitConfig, precision: Precision, cache: Path, seed: int
) -> Iterator[Path]:
    """Lock and yield the folder in the cache of what `fit_attached` makes of these arguments."""
    methods = fitted_methods(model)
    options = {name: value for name, value in attached_options(model).items() if name not in NOT_FITTED}
    key = [options, asdict(replace(fit, summed_queries=1))]  # which sets what is kept too
    text = hashlib.sha256(torch.stack(sequences).cpu().numpy().tobytes()).hexdigest()
    of_methods = [[layer, method.name] for layer, method in sorted(methods.items())]
    base = [fingerprint(model), select_numerics(model.config), precision.name]
    content = json.dumps([FORMAT, *base, text, key, of_methods, seed], sort_keys=True)
    folder = cache / "fits" / hashlib.sha256(content.encode()).hexdigest()[:16]
    with file_lock(folder / "lock", str(folder), wait=True):
        remove_stale_temp(folder)
        yield folder


def fit_attached(
    model: PreTrainedModel, sequences: list[Tensor], fit: FitConfig, precision: Precision, cache: Path, seed: int
) -> tuple[list[Measurement], float]:
    """Fit the attached methods of all layers, and set their budget.

    Args:
        sequences: token ids `(T,)`; on the last `fit.validation_sequences` the budget of `focus_dual` is chosen.

    Returns:
        Measurements of the fit, and the seconds that it took.
    """
    if not (methods := fitted_methods(model)):
        return [], 0.0
    calibration, validation = sequences[: -fit.validation_sequences], sequences[-fit.validation_sequences :]
    kind, options = find_fit(methods), attached_options(model)
    with open_fit(model, sequences, fit, precision, cache, seed) as folder:
        states, seconds = fit_layers(model, calibration, fit, precision, folder, seed)
        if kind is FITS[FocusDual]:
            load_layers(methods, states)
            chosen = options["density"], fit.summed_queries
            measurements, more = choose_layer_budgets(model, methods, validation, *chosen, precision, folder)
            return measurements, seconds + more
    if kind is FITS[KeyGate]:
        set_threshold(states, options["density"])
    for layer, state in states.items():
        methods[layer].load_state_dict(state)
    return [], seconds


def fit_layers(
    model: PreTrainedModel, sequences: list[Tensor], fit: FitConfig, precision: Precision, folder: Path, seed: int
) -> tuple[dict[int, dict[str, Tensor]], float]:
    """Return each layer's tensors, fitted or from `folder`, and the seconds in all runs.

    A fit resumes at the sequence or layers where it stopped.
    """
    methods, parts = fitted_methods(model), folder / "parts"
    # of earlier runs, which fitted as many layers at a time
    threads = count_fit_threads(precision.device)
    seconds = sum(read_seconds(x) / (threads if x.name.startswith("layer") else 1) for x in parts.glob("*"))

    def compute() -> dict[str, Tensor]:
        recorded = record(model, methods, sequences, fit.importance, precision, parts)
        tensors: dict[str, Tensor] = {}

        def fit_layer(layer: int) -> dict[str, Tensor]:
            def compute_layer() -> dict[str, Tensor]:
                generator = torch.Generator().manual_seed(seed + layer)
                return fit_one_layer(methods[layer], recorded, layer, fit, generator)

            return load_or_compute(parts / f"layer-{layer:03d}.safetensors", compute_layer)[0]

        fitted = map_in_threads(fit_layer, list(methods), precision.device)
        fitted = ProgressBar(fitted, "fitting layers", len(methods), unit="layer")
        for layer, state in zip(methods, fitted, strict=True):
            tensors |= {f"{layer}/{name}": x for name, x in state.items()}
        return tensors

    tensors, seconds = load_or_compute(folder / "layers.safetensors", compute, seconds)
    remove(parts)
    states: dict[int, dict[str, Tensor]] = {layer: {} for layer in methods}
    for name, x in tensors.items():
        layer, _, key = name.partition("/")
        states[int(layer)][key] = x
    return states, seconds


def fit_one_layer(
    method: Any, recorded: list[Path], layer: int, fit: FitConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Fit one layer's method to what was recorded; returns its tensors, and others to cache besides."""
    kind = find_fit({layer: method})
    observations = read_observations(recorded, layer, kind.observation)
    if hasattr(method, "mean"):
        standardize(method, observations)
    measured = kind.fit(method, observations, fit, generator) or {}
    return method.state_dict() | measured
