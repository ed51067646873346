"""The fit of `focus_dual` as a run sees it: read what pairs are worth, fit each layer, give each its budget.

Runs which differ in their budget alone share one fit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.dual import FocusDual
from focus_exp.config_attention import DualConfig
from focus_exp.models.methods import attached_methods, set_budget
from focus_exp.progress import ProgressBar
from focus_exp.records.rows import FitRow
from focus_exp.storage import atomic_write
from focus_exp.training.budget import allot
from focus_exp.training.curves import Curves, measure_curves
from focus_exp.training.encoder_fit import balance, fit_encoders, thresholds, thresholds_by
from focus_exp.training.importance import Observed
from focus_exp.training.kept_fit import SECONDS, fit_layers, kept_fit, seconds_in, timed
from focus_exp.training.precision import Precision

BY_PROMISE = ("query", "pair")  # of `counts`, those that need thresholds
CURVES = "curves-2"  # of a fit that is kept; raise the number when the same encoders give others
# what the fit does not depend on
NOT_FITTED = ("name", "method", "backend", "top_k", "counts", "groups_per_layer", "density", "gate_steepness")


class Fitted(NamedTuple):
    """What each layer got, and how long that took, in whichever runs it was made."""

    rows: list[FitRow]
    seconds: float


def duals_of(model: PreTrainedModel) -> dict[int, FocusDual]:
    """The methods with two encoders to fit, by layer: where a budget has left them."""
    return {i: m for i, m in attached_methods(model).items() if isinstance(m, FocusDual) and hasattr(m, "mean")}


def fit_dual(
    model: PreTrainedModel, blocks: list[Tensor], options: DualConfig, precision: Precision, cache: Path, seed: int
) -> Fitted:
    """Fit the encoders of every layer and set the budget.

    Args:
        blocks: token ids, each (T,); the last `validation_sequences` only measure the fit and decide the budget.
    """
    methods = duals_of(model)
    if not methods:
        return Fitted([], 0.0)
    chosen = {key: value for key, value in asdict(options).items() if key not in NOT_FITTED}
    with kept_fit(cache, model, blocks, precision, [], chosen, sorted(methods), seed) as folder:
        found = fit_all(model, methods, blocks, options, precision, folder, seed)
        seconds = seconds_in(folder / SECONDS, folder / f"{SECONDS}-{CURVES}-{options.counts}")
    reads = [method.reach for method in methods.values()]
    if options.density is not None:
        reads = allot(list(found.values()), options.density)
        set_budget(model, [dict(zip(methods, reads, strict=True))[layer] for layer in sorted(methods)])
    rows = [row(layer, curve, part) for (layer, curve), part in zip(found.items(), reads, strict=True)]
    return Fitted(rows, seconds)


def fit_all(
    model: PreTrainedModel,
    methods: dict[int, FocusDual],
    blocks: list[Tensor],
    options: DualConfig,
    precision: Precision,
    folder: Path,
    seed: int,
) -> dict[int, Curves]:
    """Leave `methods` fitted; what they keep of the blocks held out."""
    shown, held_out = blocks[: -options.validation_sequences], blocks[-options.validation_sequences :]

    def fit(method: FocusDual, texts: list[Observed], generator: torch.Generator) -> dict[str, Tensor]:
        fit_encoders(method, texts, options.fit_steps, generator)
        rules = {f"thresholds.{counts}": thresholds_by(method, counts, texts) for counts in BY_PROMISE}
        return method.state_dict() | rules

    for layer, state in fit_layers(model, methods, shown, precision, folder, seed, fit, options.fit_to).items():
        rules = {counts: state.pop(f"thresholds.{counts}") for counts in BY_PROMISE}
        methods[layer].load_state_dict(state | {"thresholds": rules.get(options.counts, state["thresholds"])})
    measured = folder / f"{CURVES}-by-{options.counts}.safetensors"
    if not measured.exists():
        with timed(folder / f"{SECONDS}-{CURVES}-{options.counts}"):
            found = measure_curves(model, methods, held_out, precision)
        with atomic_write(measured) as new:
            save_file({f"{layer}.{k}": v for layer, curve in found.items() for k, v in vars(curve).items()}, new)
    tensors = load_file(measured)
    return {layer: Curves(*(tensors[f"{layer}.{item.name}"] for item in fields(Curves))) for layer in methods}


@torch.no_grad()
def rebalance(model: PreTrainedModel, blocks: list[Tensor], precision: Precision) -> None:
    """Make the groups of keys alike in size on `blocks` of training text, and let queries read as many as they are to
    read, from both of which training has moved them."""
    for method, (_, keys) in logits_on(model, blocks, precision, "balancing groups").items():
        balance(method, keys.log_softmax(-1))
    # once more, as queries may be told by the same encoder
    for method, (promises, _) in logits_on(model, blocks, precision, "counting groups").items():
        method.thresholds.copy_(thresholds(promises))


def logits_on(
    model: PreTrainedModel, blocks: list[Tensor], precision: Precision, doing: str
) -> dict[FocusDual, tuple[Tensor, Tensor]]:
    """What layers that route promise to queries, and logits of keys, `[n, N, K]` of the N tokens of `blocks`."""
    found: dict[FocusDual, list[tuple[Tensor, Tensor]]] = {m: [] for m in duals_of(model).values() if m.routes}

    def noting(method: FocusDual) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        logits = method.logits

        def note(h: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            found[method].append(logits(h, position))
            return found[method][-1]

        return note

    with ExitStack() as unnoted, precision.context():
        for method in found:
            vars(method)["logits"] = noting(method)
            unnoted.callback(vars(method).pop, "logits")
        for tokens in ProgressBar(blocks, desc=doing, unit="block"):
            model(input_ids=tokens[None].to(model.device), use_cache=False, logits_to_keep=1)
    return {
        method: (torch.cat([x[0] for x, _ in of_blocks], 1), torch.cat([x[0] for _, x in of_blocks], 1))
        for method, of_blocks in found.items()
    }


def row(layer: int, found: Curves, reads: list[int]) -> FitRow:
    """What a layer keeps where its heads read so many groups."""
    k = torch.tensor(reads)[:, None]
    pairs, lost, least = (x.gather(1, k).sum().item() for x in (found.pairs, found.lost, found.least))
    distant, importance = max(found.pairs[:, -1].sum().item(), 1.0), max(found.lost[:, 0].sum().item(), 1e-30)
    return FitRow(
        layer=layer,
        reads=reads,
        pairs=pairs / distant,
        lost=lost / importance,
        least=least / importance,
        importance=importance,
    )


def table_of(fits: list[FitRow]) -> str:
    """By layer, what the encoders keep of held-out text."""
    lines = ["layer  groups read    distant pairs  change of the loss  at best in as many groups"]
    for fit in fits:
        reads = ",".join(map(str, fit.reads))
        lines.append(f"{fit.layer:>5}  {reads:<13}  {fit.pairs:>13.1%}  {fit.lost:>18.1%}  {fit.least:>10.1%}")
    return "\n".join(lines)
