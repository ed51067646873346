"""Fit an attached method to the frozen base, each layer alone, from observations of the base's attention.

Runs that differ in their budget only share one cached fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.block_gate import BlockGate
from focus_exp.attention.baselines.top_tokens import TokenIndexer
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.key_gate import GateTraining, KeyGate
from focus_exp.attention.options import FitOptions
from focus_exp.config import DualConfig
from focus_exp.models.methods import attached_methods
from focus_exp.results.measurement import Measurement
from focus_exp.training.baseline_fits import fit_block_gate, fit_gate, fit_indexer, set_threshold
from focus_exp.training.focus_dual_fit.encoders import standardize
from focus_exp.training.focus_dual_fit.fit import choose_budget, fit_dual_layer, load_layers
from focus_exp.training.focus_dual_fit.importance import Observation, fit_layers, open_fit
from focus_exp.training.precision import Precision

NOT_FITTED = (
    "name", "method", "backend", "density", "tokens_kept", "top_k", "counts", "groups_per_layer", "gate_steepness",
)  # fmt: skip

# fit of a layer by method, which may return tensors to cache besides the method's own
FITS: dict[type[AttentionMethod], Callable[..., dict[str, Tensor] | None]] = {
    FocusDual: fit_dual_layer,
    TokenIndexer: fit_indexer,
    KeyGate: fit_gate,
    BlockGate: fit_block_gate,
}


def get_fit_key(options: FitOptions) -> dict[str, Any]:
    """Return the options that decide the parameters."""
    key = {name: value for name, value in asdict(options).items() if name not in NOT_FITTED}
    return key | {"rank": 0} if isinstance(options, DualConfig) else key  # as fits of earlier versions have it


def fitted_methods(model: PreTrainedModel) -> dict[int, Any]:
    """Return the attached methods that are fitted, by layer; a budget may have removed what is fitted."""
    return {i: m for i, m in attached_methods(model).items() if hasattr(m, "mean")}


@contextmanager
def open_attached(
    model: PreTrainedModel, sequences: list[Tensor], options: FitOptions, precision: Precision, cache: Path, seed: int
) -> Iterator[Path]:
    """Lock and yield the folder in the cache of what `fit_attached` makes of these arguments."""
    methods = fitted_methods(model)
    # earlier versions hashed the sequences that choose a budget too
    hashed, names = sequences, list[str]()
    if not isinstance(options, DualConfig):
        hashed, names = sequences[: -options.validation_sequences], [next(iter(methods.values())).name]
    with open_fit(cache, model, hashed, precision, names, get_fit_key(options), sorted(methods), seed) as folder:
        yield folder


def count_remaining(
    model: PreTrainedModel, sequences: list[Tensor], options: FitOptions, precision: Precision, cache: Path, seed: int
) -> tuple[int, int]:
    """Count the passes over sequences and the layers that `fit_attached` has left to do, after earlier runs."""
    calibration = len(sequences) - options.validation_sequences
    passes = len(sequences) if isinstance(options, DualConfig) else calibration
    with open_attached(model, sequences, options, precision, cache, seed) as folder:
        if (folder / "layers.safetensors").exists():
            return 0 if any(folder.glob("curves*")) else passes - calibration, 0
        layers, parts = (len([*folder.glob(f"parts/{name}*")]) for name in ("layer", ""))
        return passes - (parts - layers), len(fitted_methods(model)) - layers


def fit_attached(
    model: PreTrainedModel, sequences: list[Tensor], options: FitOptions, precision: Precision, cache: Path, seed: int
) -> tuple[list[Measurement], float]:
    """Fit the attached methods of all layers, and set their budget.

    Args:
        sequences: token ids `(T,)`; on the last `validation_sequences` the budget of `focus_dual` is chosen.

    Returns:
        Measurements of the fit, and the seconds that it took.
    """
    methods = fitted_methods(model)
    if not methods:
        return [], 0.0
    kind = type(next(iter(methods.values())))
    calibration, validation = sequences[: -options.validation_sequences], sequences[-options.validation_sequences :]
    importance = getattr(options, "fit_to", "attention" if issubclass(kind, BlockGate) else "loss")

    def fit(method: Any, observations: list[Observation], generator: torch.Generator) -> dict[str, Tensor]:
        measured = fit_one_layer(method, observations, options, generator)
        return method.state_dict() | measured

    with open_attached(model, sequences, options, precision, cache, seed) as folder:
        states, seconds = fit_layers(model, methods, calibration, precision, folder, seed, fit, importance)
        if isinstance(options, DualConfig):
            load_layers(methods, states, options.counts)
            measurements, more = choose_budget(model, methods, validation, options, precision, folder)
            return measurements, seconds + more
    if isinstance(options, GateTraining):
        set_threshold(states, options.density)
    for layer, state in states.items():
        methods[layer].load_state_dict(state)
    return [], seconds


def fit_one_layer(
    method: Any, observations: list[Observation], options: FitOptions, generator: torch.Generator
) -> dict[str, Tensor]:
    """Fit one layer's method; returns tensors to cache besides its own."""
    standardize(method, observations)
    fit = next(fit for base, fit in FITS.items() if isinstance(method, base))
    return fit(method, observations, options, generator) or {}
