"""Fit the encoders of `focus_dual` to a frozen model, and allocate groups to heads by the importance that they lose."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.focus_dual import UNSET, FocusDual
from focus_exp.attention.selection import top_k_groups
from focus_exp.config import FitConfig
from focus_exp.fitting.encoders import balance_keys, fit_encoders, fit_thresholds, score_thresholds
from focus_exp.fitting.focus import run_forward
from focus_exp.fitting.importance import (
    LossProbe,
    Observation,
    PairChanges,
    backpropagate,
    fitted_methods,
    load_or_compute,
)
from focus_exp.models.head import Head
from focus_exp.models.methods import set_budget
from focus_exp.progress import ProgressBar
from focus_exp.results.measurement import Measurement
from focus_exp.training.precision import Precision


@dataclass
class BudgetCurves:
    """Sums over the queries of validation sequences that read k = 0 to K groups, each `(n, K + 1)` by routed head.

    Args:
        pairs: number of distant pairs that are kept.
        lost: squared first-order change of the loss when all other distant pairs are pruned [nats^2], of each query or
            of neighbouring ones together. Alone, a head that makes the same small error everywhere seems harmless.
    """

    pairs: Tensor
    lost: Tensor

    def __add__(self, other: BudgetCurves) -> BudgetCurves:
        return BudgetCurves(self.pairs + other.pairs, self.lost + other.lost)


class CurveProbe(LossProbe):
    """Record the `BudgetCurves` of `method`, with the changes of `summed` neighbouring queries added."""

    def __init__(self, method: FocusDual, summed: int) -> None:
        super().__init__(method.shape, method.window, method.sinks)
        self.method = [method]  # in a list: not a submodule
        self.summed = summed
        self.curves: BudgetCurves | None = None

    @torch.no_grad()
    def record(self, k: Tensor, changes: Iterator[PairChanges]) -> None:
        (method,) = self.method
        queries, keys = method.logits(self.hidden, torch.arange(self.hidden.shape[1], device=k.device)[None])
        members = top_k_groups(keys[0], 1).float()
        scores, order = queries[0].sort(-1, descending=True)
        counts, recorded = read_counts(method, scores), []
        for part in changes:
            rows, width = part.rows, part.loss.shape[-1]
            # in float64: counts stay whole numbers
            sizes = (part.distant.double() @ members[:, :width].double()).gather(-1, order[:, rows])
            pairs = F.pad(sizes.cumsum(-1), (1, 0)).gather(-1, counts[:, rows])
            by_head = members[:, None, :width].expand(part.loss.shape[0] if method.heads > 1 else 1, -1, -1, -1)
            # query heads of a routed head lose the same pairs: their changes add up
            change, attention = ((x * part.distant) @ by_head for x in (part.loss, part.attention))
            lost = pruned_change(change, attention, order[:, rows], method.heads).gather(-1, counts[:, rows])
            recorded.append((pairs, lost))
        pairs, lost = (torch.cat(x, 1) for x in zip(*recorded, strict=True))
        curves = BudgetCurves(pairs.sum(1), sum_neighbours(lost, self.summed).square().sum(1))
        self.curves = curves if self.curves is None else self.curves + curves


def sum_neighbours(x: Tensor, count: int) -> Tensor:
    """Sum every `count` queries of `(n, t, K + 1)`, the last of which may be fewer."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % count)).unflatten(1, (-1, count)).sum(2)


def read_counts(method: FocusDual, scores: Tensor) -> Tensor:
    """Count the groups that queries read for k = 0 to K, `(n, T, K + 1)`, from descending scores `(n, T, K)`."""
    thresholds = method.thresholds[:, None].expand(-1, scores.shape[1], -1)
    counts = torch.arange(method.groups + 1, device=scores.device).repeat(*scores.shape[:2], 1)
    if method.counts != "head":
        passed = torch.searchsorted(-scores.contiguous(), -thresholds.contiguous())
        counts[..., 1:-1] = torch.where(thresholds == UNSET, counts[..., 1:-1], passed)
    return counts


def pruned_change(change: Tensor, attention: Tensor, order: Tensor, heads: int) -> Tensor:
    """Compute the change of the loss [nats] when queries keep the first k groups, `(n, t, K + 1)`.

    Without a mass m the rest of a softmax weighs 1 / (1 - m) as much, and so does its change.

    Args:
        change, attention: `(G, H / G, t, K)`, sums over the pairs of each group.
        order: `(n, t, K)` groups.
        heads: routed heads n.
    """
    order = order[:, None].expand(change.shape)
    # with k groups kept, those after them are pruned
    pruned, mass = (F.pad(x.gather(-1, order).flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in (change, attention))
    total = (pruned / (1 - mass).clamp(min=1e-3)).sum(1)
    return (total if heads > 1 else total.sum(0, keepdim=True)).double()


def measure_curves(
    model: PreTrainedModel,
    methods: Mapping[int, FocusDual],
    sequences: list[Tensor],
    precision: Precision,
    summed: int = 1,
) -> dict[int, BudgetCurves]:
    """Measure each layer's curves on validation sequences `(T,)`."""
    probes = {layer: CurveProbe(method, summed) for layer, method in methods.items()}
    head = Head(model)
    for tokens in ProgressBar(sequences, desc="measuring the fit", unit="sequence"):
        backpropagate(head, probes, tokens, precision)
    curves = {}
    for layer, probe in probes.items():
        assert probe.curves is not None
        curves[layer] = BudgetCurves(*(x.cpu() for x in vars(probe.curves).values()))
    return curves


def allocate_groups(curves: list[BudgetCurves], density: float) -> list[list[int]]:
    """Choose the number of groups by layer and head that minimizes the lost loss at `density` of all distant pairs.

    Greedy on the convex hull of each head's curve: the next groups go where they save most per pair. Squared changes of
    one loss compare across layers.
    """
    reads = [[0] * len(curve.pairs) for curve in curves]
    total = sum(curve.pairs[:, -1].sum().item() for curve in curves)
    remaining = density * total * (1 + 1e-9)  # rounding
    heads = [(layer, head) for layer, curve in enumerate(curves) for head in range(len(curve.pairs))]
    hulls = {(layer, head): upper_hull(curves[layer].pairs[head], -curves[layer].lost[head]) for layer, head in heads}
    queue: list[tuple[float, int, int, int]] = []

    def push(layer: int, head: int, corner: int) -> None:
        corners = hulls[layer, head]
        if corner < len(corners):
            pairs, lost = curves[layer].pairs[head], curves[layer].lost[head]
            before, after = corners[corner - 1], corners[corner]
            gain = (lost[before] - lost[after]) / (pairs[after] - pairs[before]).clamp(min=1)
            heapq.heappush(queue, (-gain.item(), layer, head, corner))

    for layer, head in heads:
        push(layer, head, 1)
    while queue:
        _, layer, head, corner = heapq.heappop(queue)
        pairs, target = curves[layer].pairs[head], hulls[layer, head][corner]
        cost = (pairs[target] - pairs[reads[layer][head]]).item()
        if cost <= remaining:
            reads[layer][head] = target
            remaining -= cost
            push(layer, head, corner + 1)
    return reads


def upper_hull(x: Tensor, y: Tensor) -> list[int]:
    """Return the indices of the corners of the upper convex hull of points (x, y), by ascending x."""
    corners: list[int] = []
    for c in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y[b] - y[a]) * (x[c] - x[a]) > (y[c] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(c)
    return corners


WITH_THRESHOLDS = ("query", "pair")  # values of `counts`
CURVES = "curves-3"  # increase when the same encoders give other curves


def fit_dual_layer(
    method: FocusDual, observations: list[Observation], options: FitConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Fit a layer's encoders; returns its thresholds under every counting rule that has them."""
    fit_encoders(method, observations, options.steps, options.learning_rate, generator, options.ignored_means)
    return {f"thresholds.{counts}": fit_thresholds(method, counts, observations) for counts in WITH_THRESHOLDS}


def load_layers(methods: Mapping[int, FocusDual], states: dict[int, dict[str, Tensor]]) -> None:
    """Load fitted layers, with their thresholds under the methods' counting rule."""
    for layer, state in states.items():
        method, thresholds = methods[layer], {rule: state.pop(f"thresholds.{rule}") for rule in WITH_THRESHOLDS}
        method.load_state_dict(state | {"thresholds": thresholds.get(method.counts, state["thresholds"])})


def curves_path(folder: Path, counts: str, summed_queries: int) -> Path:
    """Return the file in a fit's folder for the budget curves that these options need."""
    summed = f"-of-{summed_queries}" if summed_queries > 1 else ""
    return folder / f"{CURVES}-by-{counts}{summed}.safetensors"


def choose_layer_budgets(
    model: PreTrainedModel,
    methods: Mapping[int, FocusDual],
    sequences: list[Tensor],
    density: float | None,
    summed_queries: int,
    precision: Precision,
    folder: Path,
) -> tuple[list[Measurement], float]:
    """Measure the fit on `sequences`, each `(T,)`, and allocate groups to heads if a density is given.

    Returns:
        Measurements of each layer, and the seconds that the pass in `folder` took.
    """

    def measure() -> dict[str, Tensor]:
        measured = measure_curves(model, methods, sequences, precision, summed_queries)
        return {f"{i}.{name}": x for i, curve in measured.items() for name, x in vars(curve).items()}

    path = curves_path(folder, next(iter(methods.values())).counts, summed_queries)
    tensors, seconds = load_or_compute(path, measure)
    curves = {i: BudgetCurves(*(tensors[f"{i}.{item.name}"] for item in fields(BudgetCurves))) for i in methods}
    reads = [method.groups_per_head for method in methods.values()]
    if density is not None:
        reads = allocate_groups(list(curves.values()), density)
        set_budget(model, [dict(zip(methods, reads, strict=True))[layer] for layer in sorted(methods)])
    layers = zip(curves.items(), reads, strict=True)
    return [m for (layer, curve), groups in layers for m in describe_fit(layer, curve, groups)], seconds


def describe_fit(layer: int, curves: BudgetCurves, reads: list[int]) -> Iterator[Measurement]:
    """Yield the fit of a layer whose heads read these numbers of groups, on validation sequences.

    importance_lost_fraction: of the importance [nats^2], by pruning the pairs of other groups.
    """
    k = torch.tensor(reads)[:, None]
    pairs, lost = (x.gather(1, k).sum().item() for x in (curves.pairs, curves.lost))
    distant, importance = max(curves.pairs[:, -1].sum().item(), 1.0), max(curves.lost[:, 0].sum().item(), 1e-30)
    rows: list[tuple[str, float, str, dict[str, int]]] = [
        ("distant_density_fit", pairs / distant, "fraction", {}),
        ("importance_lost_fraction", lost / importance, "fraction", {}),
        ("importance", importance, "nats^2", {}),
        *(("groups_per_query", groups, "groups", {"head": head}) for head, groups in enumerate(reads)),
    ]
    for metric, value, unit, settings in rows:
        settings = {"layer": layer, **settings}
        yield Measurement(variant="focus_dual", metric=metric, value=value, unit=unit, settings=settings)


@torch.no_grad()
def rebalance(model: PreTrainedModel, sequences: list[Tensor], precision: Precision) -> None:
    """Balance the groups of keys and reset the thresholds of queries after training has moved both."""
    for method, (_, keys) in record_logits(model, sequences, precision, "balancing groups").items():
        balance_keys(method, keys.log_softmax(-1))
    # a second pass, because one encoder may serve queries and keys
    for method, (scores, _) in record_logits(model, sequences, precision, "setting thresholds").items():
        method.thresholds.copy_(score_thresholds(scores))


def record_logits(
    model: PreTrainedModel, sequences: list[Tensor], precision: Precision, description: str
) -> dict[FocusDual, tuple[Tensor, Tensor]]:
    """Return queries' scores and keys' logits `(n, N, K)` of routing layers on the N tokens of `sequences`."""
    recorded: dict[FocusDual, list[tuple[Tensor, Tensor]]] = {}

    def record(method: Any, args: tuple[Any, ...]) -> None:
        if args[0] == "route":
            _, h, sequence = args
            position = torch.arange(h.shape[1], device=h.device) - sequence.start
            recorded.setdefault(method, []).append(method.logits(h, position))

    handles = [m.register_forward_pre_hook(record) for m in fitted_methods(model).values() if m.is_routed]
    run_forward(model, sequences, precision, description)
    for handle in handles:
        handle.remove()
    return {
        method: (torch.cat([x[0] for x, _ in pairs], 1), torch.cat([x[0] for _, x in pairs], 1))
        for method, pairs in recorded.items()
    }
