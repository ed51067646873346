"""Where pairs go: how many groups the queries of each layer and head read, under one budget of distant pairs."""

from __future__ import annotations

import heapq

from torch import Tensor

from focus_exp.training.curves import Curves


def allot(found: list[Curves], share: float) -> list[list[int]]:
    """By layer and head the number of groups to read, of `found` by layer, so that the least is lost with at most
    `share` of all distant pairs.

    What is lost is the squared change of one loss, so that it compares across layers. Each step goes to the head whose
    next stretch of groups saves most for a pair; stretches are those of the hull of its curve, on which a head's first
    groups save no less than those that follow.
    """
    reads = [[0] * len(curve.pairs) for curve in found]
    total = sum(curve.pairs[:, -1].sum().item() for curve in found)
    left = share * total * (1 + 1e-9)  # of rounding
    heads = [(layer, head) for layer, curve in enumerate(found) for head in range(len(curve.pairs))]
    hulls = {(layer, head): hull(found[layer].pairs[head], -found[layer].lost[head]) for layer, head in heads}
    queue: list[tuple[float, int, int, int]] = []

    def offer(layer: int, head: int, corner: int) -> None:
        corners = hulls[layer, head]
        if corner < len(corners):
            pairs, lost = found[layer].pairs[head], found[layer].lost[head]
            before, after = corners[corner - 1], corners[corner]
            gain = (lost[before] - lost[after]) / (pairs[after] - pairs[before]).clamp(min=1)
            heapq.heappush(queue, (-gain.item(), layer, head, corner))

    for layer, head in heads:
        offer(layer, head, 1)
    while queue:
        _, layer, head, corner = heapq.heappop(queue)
        pairs, target = found[layer].pairs[head], hulls[layer, head][corner]
        cost = (pairs[target] - pairs[reads[layer][head]]).item()
        if cost <= left:
            reads[layer][head] = target
            left -= cost
            offer(layer, head, corner + 1)
    return reads


def hull(pairs: Tensor, kept: Tensor) -> list[int]:
    """Numbers of groups at the corners of the upper hull of what is kept `[K + 1]` over pairs `[K + 1]`."""
    corners: list[int] = []
    for k in range(len(pairs)):
        while len(corners) > 1 and rises(pairs, kept, corners[-2], corners[-1], k):
            corners.pop()
        corners.append(k)
    return corners


def rises(pairs: Tensor, kept: Tensor, a: int, b: int, c: int) -> bool:
    """Whether the corner b lies on or below the line from a to c."""
    return bool((kept[b] - kept[a]) * (pairs[c] - pairs[a]) <= (kept[c] - kept[a]) * (pairs[b] - pairs[a]))
