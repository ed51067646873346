"""What a layer keeps when a query reads the k groups that it asks first, for every k: what budgets are decided by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.dual import UNSET, FocusDual
from focus_exp.attention.selection import top_k_groups
from focus_exp.progress import ProgressBar
from focus_exp.training.importance import Changes, LossProbe, propagate
from focus_exp.training.precision import Precision


@dataclass
class Curves:
    """Sums over the queries of held-out text, which read k = 0 to K groups, each or on average, by head with groups of
    its own.

    pairs: `[n, K + 1]`, distant pairs kept. lost, least: `[n, K + 1]` [nats^2], the squared change of the loss, to
    first order, where all other distant pairs go at once; in the order of the query's encoder, and by the groups that
    change most first.
    """

    pairs: Tensor
    lost: Tensor
    least: Tensor

    def __add__(self, other: Curves) -> Curves:
        return Curves(self.pairs + other.pairs, self.lost + other.lost, self.least + other.least)


class CurveProbe(LossProbe):
    """Notes the `Curves` of `method`."""

    def __init__(self, method: FocusDual) -> None:
        super().__init__(method.shape, method.window, method.sinks)
        self.method = [method]  # not a part of this one
        self.curves: Curves | None = None

    @torch.no_grad()
    def note(self, k: Tensor, changes: Iterator[Changes]) -> None:
        (method,) = self.method
        queries, keys = method.logits(self.hidden, torch.arange(self.hidden.shape[1], device=k.device)[None])
        members = top_k_groups(keys[0], 1).float()
        promises, order = queries[0].sort(-1, descending=True)
        counts = read_counts(method, promises)
        for part in changes:
            rows, width = part.rows, part.loss.shape[-1]
            # counts stay whole numbers: autocast leaves float64 as it is
            sizes = (part.distant.double() @ members[:, :width].double()).gather(-1, order[:, rows])
            pairs = F.pad(sizes.cumsum(-1), (1, 0)).gather(-1, counts[:, rows])
            of_heads = members[:, None, :width].expand(part.loss.shape[0] if method.heads > 1 else 1, -1, -1, -1)
            # all query heads of a head with groups lose the same pairs: their changes add up
            changed, attention = (x @ of_heads for x in (part.loss, part.attention))
            found = lost(changed, attention, order[:, rows], method.heads).gather(-1, counts[:, rows])
            least = lost(changed, attention, None, method.heads)
            curves = Curves(pairs.sum(1), found.sum(1), least.sum(1))
            self.curves = curves if self.curves is None else self.curves + curves


def read_counts(method: FocusDual, promises: Tensor) -> Tensor:
    """How many groups queries with these promises `[n, T, K]`, largest first, read for k = 0 to K `[n, T, K + 1]`."""
    least = method.thresholds[:, None].expand(-1, promises.shape[1], -1)
    fixed = torch.arange(method.groups + 1, device=promises.device).repeat(*promises.shape[:2], 1)
    if method.counts != "head":
        passed = torch.searchsorted(-promises.contiguous(), -least.contiguous())
        fixed[..., 1:-1] = torch.where(least == UNSET, fixed[..., 1:-1], passed)
    return fixed


def lost(changed: Tensor, attention: Tensor, order: Tensor | None, heads: int) -> Tensor:
    """Squared change of the loss of queries that read the first k groups of `order` `[n, t, K]`, `[n, t, K + 1]`;
    without an order those first whose change is largest.

    changed, attention: `[G, H / G, t, K]`, of removing each group from each query head. What remains of a softmax
    without a mass m weighs 1 / (1 - m) as much, and so does its change.
    """
    if order is None:
        whole = changed.sum(1)
        order = (whole if heads > 1 else whole.sum(0, keepdim=True)).abs().argsort(-1, descending=True)
    chosen = order[:, None].expand(changed.shape)
    # what goes when the first k are read is what comes after them
    gone, mass = (F.pad(x.gather(-1, chosen).flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in (changed, attention))
    change = (gone / (1 - mass).clamp(min=1e-3)).sum(1)
    change = change if heads > 1 else change.sum(0, keepdim=True)
    return change.double().square()


def measure_curves(
    model: PreTrainedModel, methods: Mapping[int, FocusDual], blocks: list[Tensor], precision: Precision
) -> dict[int, Curves]:
    """By layer, over `blocks` `[T]` of token ids that the encoders have not seen."""
    probes = {layer: CurveProbe(method) for layer, method in methods.items()}
    for block in ProgressBar(blocks, desc="measuring what groups keep", unit="block"):
        propagate(model, probes, block, precision)
    found = {}
    for layer, probe in probes.items():
        assert probe.curves is not None
        found[layer] = Curves(*(x.cpu() for x in vars(probe.curves).values()))
    return found
