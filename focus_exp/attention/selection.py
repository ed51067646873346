"""Query-key pairs that attention keeps, as masks and counts: window, sinks and groups.

Shapes: B batch, T tokens, K groups, H query heads, G key/value heads, D head size, t rows (queries of a block), S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """Describe where the tokens of a batch are and what the base model's mask lets them see.

    Attributes:
        start: `(B, T)` int, index of the first token of each token's own sequence, see `sequence_starts`.
        valid: `(B, T)` bool, False on padding; None without.
        allowed: `(B or 1, 1, T, T)` bool, the base model's mask where it is more than causality and padding (sliding
            layers, chunks, packed sequences); else None.
        reach: a query i sees the keys j with i - j < reach, and `allowed` says no more; else None.
        order: `(B, T)` int, padding first, where there is some between tokens; else None. compact: in that order.
    """

    start: Tensor
    valid: Tensor | None = None
    allowed: Tensor | None = None
    reach: int | None = None
    order: Tensor | None = None
    compact: Sequence | None = None

    @staticmethod
    def plain(batch: int, length: int, device: torch.device | str = "cpu") -> Sequence:
        """Describe one causal sequence per row, without padding."""
        return Sequence(start=torch.zeros(batch, length, dtype=torch.long, device=device))

    def reorder(self, order: Tensor) -> Sequence:
        """Put the tokens in an order `(B, T)` with padding first: windows and sinks then count the others alone."""
        assert self.valid is not None
        valid, allowed = self.valid.gather(1, order), self.allowed
        if allowed is not None:
            allowed = allowed.expand(len(valid), -1, -1, -1)
            allowed = reorder(reorder(allowed, order, 2), order, 3)
        first = (valid[:, None] if allowed is None else allowed[:, 0]).byte().argmax(-1).expand_as(valid)
        return Sequence(sequence_starts(first), valid, allowed)

    @property
    def mask(self) -> Tensor | None:
        """Mask for `full_attention`: `allowed`, or `(B, 1, 1, T)` where there is padding alone."""
        return self.allowed if self.allowed is not None or self.valid is None else self.valid[:, None, None]

    def valid_or_all(self) -> Tensor:
        """Return `valid`, all True where there is no padding."""
        return torch.ones_like(self.start, dtype=torch.bool) if self.valid is None else self.valid

    def repeat_rows(self, times: int) -> Sequence:
        """Repeat every row `times` times, one after the other."""
        start, valid, allowed = (
            x if x is None or len(x) < len(self.start) else x.repeat_interleave(times, 0)
            for x in (self.start, self.valid, self.allowed)
        )
        assert start is not None
        return Sequence(start, valid, allowed, self.reach)


@dataclass(frozen=True)
class Selection:
    """Hold what a method selects for one layer; tensors may have a key/value head dimension, `(B, G, T, ...)`.

    Attributes:
        assignment: `(B, T, K)` float, soft distribution over groups; None without routing.
        query_groups, key_groups: `(B, T, K)` bool, memberships for hard routing; None for soft routing.
        is_dense: the memberships prune no pair, whatever the tokens.
        key_assignment: assignment of a token as key, where it differs from the one as query.
        max_groups: upper bounds on a token's groups as query and as key; None for K.
        is_nested: as query, each token is in exactly `max_groups` groups, among them all of its groups as key.
    """

    assignment: Tensor | None = None
    query_groups: Tensor | None = None
    key_groups: Tensor | None = None
    is_dense: bool = False
    key_assignment: Tensor | None = None
    max_groups: tuple[int, int] | None = None
    is_nested: bool = False

    def reorder(self, order: Tensor) -> Selection:
        """Return the selection with its tokens in an order `(B, T)`."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        changed: dict[str, Any] = {name: reorder(x, order, x.ndim - 2) for name, x in tensors.items()}
        return replace(self, **changed)

    @property
    def is_soft(self) -> bool:
        """Soft routing, whose gates weigh every pair; not hard routing, nor none."""
        return self.assignment is not None and self.query_groups is None

    @property
    def effective_key_assignment(self) -> Tensor:
        """Assignment `(B, T, K)` of tokens as keys; that of queries where both share one."""
        assignment = self.assignment if self.key_assignment is None else self.key_assignment
        assert assignment is not None
        return assignment


@dataclass(frozen=True)
class AttentionArgs:
    """Carry what attention takes besides q, k, v, the selection and the sequence.

    The model sets the first four; a method adds the others (`AttentionMethod.complete_args`).

    Attributes:
        scaling: factor of q . k.
        softcap: c in c * tanh(s / c), applied to scaled scores.
        dropout: probability with which an attention weight is dropped.
        sink_logits: `(H,)` or `(B, H)`, the base model's learned attention sinks: the logit of one more key, which
            every query sees and which has no value.
        window: a query i sees the keys j of its sequence with i - j <= window.
        sinks: a query sees this many first tokens of its sequence.
        gate: soft routing adds the log of the gate to the scores ("log") or multiplies them by it ("multiplicative").
        gate_steepness: lambda of the gate sigmoid(lambda * (g_i . g_j - threshold)).
        gate_threshold: threshold of the gate; eq. 2 has 0.
        ste_slope: slope of the gate whose gradient hard routing passes to the assignment (straight-through estimator);
            None passes no gradient.
    """

    scaling: float
    softcap: float | None = None
    dropout: float = 0.0
    sink_logits: Tensor | None = None
    window: int = 0
    sinks: int = 0
    gate: str = "log"
    gate_steepness: float = 10.0
    gate_threshold: float = 0.5
    ste_slope: float | None = None


def for_each_head(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let attention with one grouping per row serve one per key/value head, by folding heads into the batch."""

    @wraps(attention)
    def attend(
        q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs, **options: Any
    ) -> Tensor:
        selection, sequence, heads = fold_heads(selection, sequence)
        if heads == 1:
            return attention(q, k, v, selection, sequence, args, **options)
        if args.sink_logits is not None:
            args = replace(args, sink_logits=args.sink_logits.view(heads, -1).repeat(len(q), 1))
        rows = [x.unflatten(1, (heads, -1)).flatten(0, 1) for x in (q, k, v)]
        return attention(*rows, selection, sequence, args, **options).unflatten(0, (-1, heads)).flatten(1, 2)

    return attend


def fold_heads(selection: Selection, sequence: Sequence) -> tuple[Selection, Sequence, int]:
    """Fold groups `(B, G, T, ...)` of each key/value head into B * G rows.

    Returns:
        the selection and the sequence of the rows, and G, or 1 where all heads share their groups.
    """
    tensors = {name: x for name, x in vars(selection).items() if isinstance(x, Tensor)}
    per_head = {name for name, x in tensors.items() if x.ndim == 4}
    if not per_head:
        return selection, sequence, 1
    heads = max(tensors[name].shape[1] for name in per_head)
    folded: dict[str, Any] = {}
    for name, x in tensors.items():
        x = x if name in per_head else x[:, None]
        folded[name] = x.expand(-1, heads, *x.shape[2:]).flatten(0, 1)
    return replace(selection, **folded), sequence if heads == 1 else sequence.repeat_rows(heads), heads


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values `(B, G, S, D)` for every query head: `(B, H, S, D)`."""
    n_rep = q.shape[1] // k.shape[1]
    return k.repeat_interleave(n_rep, dim=1), v.repeat_interleave(n_rep, dim=1)


def mark_band(mask: Tensor) -> None:
    """Set `reach` of a mask `(B, 1, T, T)` bool where it is that of a sliding layer without padding: i - j < reach."""
    length = mask.shape[-1]
    if mask.device.type != "cpu" or mask.shape[-2] != length:  # where no kernel takes it, nothing waits for the device
        return
    reach = int(mask[0, 0, -1].sum())
    band = causal_mask(slice(0, length), length, mask.device).triu(1 - reach)
    if torch.equal(mask, band.expand_as(mask)):
        mask.reach = reach  # type: ignore[attr-defined]  # tensors take attributes; torch's annotations do not say so


def band_reach(mask: Tensor | None) -> int | None:
    """Return what `mark_band` found; None elsewhere."""
    return getattr(mask, "reach", None)


def has_gaps(valid: Tensor) -> Tensor:
    """Return, as a bool tensor, whether any row of `valid` `(B, T)` has padding between tokens."""
    begins = valid & ~F.pad(valid[:, :-1], (1, 0))
    return (begins.sum(1) > 1).any()


def reorder(x: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """Put dimension `dim` of x `(B, ...)` in an order `(B, T)`, each row in its own."""
    if order is None:
        return x
    shape = [len(order) if i == 0 else order.shape[1] if i == dim else 1 for i in range(x.ndim)]
    return x.gather(dim, order.view(shape).expand_as(x))


def sequence_starts(first: Tensor) -> Tensor:
    """Return `(B, T)` int, where each token's sequence starts: at a token that sees none before itself.

    Args:
        first: `(B, T)` int, the first token that each one sees.
    """
    position = torch.arange(first.shape[1], device=first.device)
    return torch.where(first == position, position, 0).cummax(1).values


def local_only_selection(sequence: Sequence) -> Selection:
    """Express window and sinks alone as memberships: one group of all queries and of no key."""
    query_groups = torch.ones(*sequence.start.shape, 1, dtype=torch.bool, device=sequence.start.device)
    return Selection(query_groups=query_groups, key_groups=torch.zeros_like(query_groups))


def top_k_groups(assignment: Tensor, k: int) -> Tensor:
    """Return `(B, T, K)` bool, the k largest entries; ties go to the lowest index."""
    order = torch.argsort(assignment, dim=-1, descending=True, stable=True)[..., :k]
    return torch.zeros_like(assignment, dtype=torch.bool).scatter_(-1, order, True)


def select(assignment: Tensor, top_k: int, pair_rule: str) -> Selection:
    """Turn an assignment `(B, T, K)` into hard memberships.

    Args:
        pair_rule: "share" keeps a pair if the two top-k sets overlap (eq. 3); "query_topk" if the key's first group is
            among the query's top k, which under balance keeps k/K of the distant pairs.
    """
    first = torch.zeros_like(assignment, dtype=torch.bool).scatter_(-1, assignment.argmax(-1, keepdim=True), True)
    query_groups = first if top_k == 1 else top_k_groups(assignment, top_k)
    key_groups = query_groups if pair_rule == "share" else first
    max_groups = (top_k, top_k if pair_rule == "share" else 1)
    is_dense = is_dense_rule(assignment.shape[-1], top_k, pair_rule)
    return Selection(assignment, query_groups, key_groups, is_dense, max_groups=max_groups, is_nested=True)


def is_dense_rule(groups: int, top_k: int, pair_rule: str) -> bool:
    """Tell whether the rule keeps every pair: two sets of k out of K groups always overlap where 2k > K."""
    return top_k >= groups or (pair_rule == "share" and 2 * top_k > groups)


def causal_mask(rows: slice, length: int, device: torch.device) -> Tensor:
    """Return `(t, S)` bool, j <= i."""
    return torch.arange(rows.start, rows.stop, device=device)[:, None] >= torch.arange(length, device=device)


def diagonal_mask(rows: slice, length: int, device: torch.device) -> Tensor:
    """Return `(t, S)` bool, j = i."""
    return torch.arange(rows.start, rows.stop, device=device)[:, None] == torch.arange(length, device=device)


def local_mask(sequence: Sequence, rows: slice, length: int, window: int, sinks: int) -> Tensor:
    """Return `(B, t, S)` bool: i - j <= window, or j is a sink of i's sequence."""
    start = sequence.start[:, rows, None]
    i = torch.arange(rows.start, rows.stop, device=start.device)[:, None]
    return is_local_or_sink(i, torch.arange(length, device=start.device), start, window, sinks)


def is_local_or_sink(i: Tensor, j: Tensor, start: Tensor, window: int, sinks: int) -> Tensor:
    """Tell whether key j is in the window of query i or a sink of the sequence that begins at `start`."""
    return (i - j <= window) | ((j >= start) & (j < start + sinks))


def base_mask(sequence: Sequence, rows: slice, length: int) -> Tensor:
    """Return `(B or 1, t, S)` bool, the pairs that the base model's own mask allows."""
    if sequence.allowed is not None:
        return sequence.allowed[:, 0, rows, :length]
    mask = causal_mask(rows, length, sequence.start.device)[None]
    return mask if sequence.valid is None else mask & sequence.valid[:, None, :length]


def base_mask_or_self(sequence: Sequence, rows: slice, length: int) -> Tensor:
    """Return `base_mask` with the diagonal, so that no row of a softmax is empty on padding."""
    return base_mask(sequence, rows, length) | diagonal_mask(rows, length, sequence.start.device)


def unpadded_mask(sequence: Sequence, rows: slice) -> Tensor:
    """Return `(B, t, rows.stop)` bool, `base_mask` without padding queries and keys."""
    mask = base_mask(sequence, rows, rows.stop)
    if sequence.valid is not None:
        mask = mask & sequence.valid[:, rows, None] & sequence.valid[:, None, : rows.stop]
    return mask.expand(len(sequence.start), -1, -1)


def distant_keys(position: Tensor, local: int) -> Tensor:
    """Count the keys beyond `local` tokens of window and sinks of queries at `position` in their sequences."""
    return (position - local).clamp(min=0)


def group_mask(selection: Selection, rows: slice, length: int) -> Tensor:
    """Return `(B, t, S)` bool: query and key have a group in common."""
    assert selection.query_groups is not None and selection.key_groups is not None
    return groups_overlap(selection.query_groups[:, rows], selection.key_groups[:, :length])


def groups_overlap(query_groups: Tensor, key_groups: Tensor) -> Tensor:
    """Return `(..., t, S)` bool, whether memberships `(..., t, K)` and `(..., S, K)` have a group in common."""
    return query_groups.float() @ key_groups.float().transpose(-1, -2) > 0


def row_blocks(length: int, size: int) -> Iterator[slice]:
    """Yield blocks of queries; a causal block needs only the keys up to its own end."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


@dataclass(frozen=True)
class PairCounts:
    """Count causal query-key pairs: all, those beyond window and sinks, and those of them that are kept."""

    total: int
    distant: int
    distant_kept: int

    @property
    def density(self) -> float:
        """Kept pairs over all pairs."""
        return (self.total - self.distant + self.distant_kept) / self.total


def count_pairs(
    selection: Selection | None, sequence: Sequence, window: int, sinks: int, block: int = 512
) -> PairCounts:
    """Count the pairs of a batch without padding, by the masks that the attention itself uses.

    Args:
        selection: None keeps every distant pair, one without memberships none. Where key/value heads have groups of
            their own, pairs count once per head.
        block: queries at a time.
    """
    if selection is not None:
        selection, sequence, _ = fold_heads(selection, sequence)
    is_plain = sequence.allowed is None and sequence.valid is None and not bool(sequence.start.any())
    if is_plain or sequence.reach is not None:
        return count_unpadded_pairs(selection, sequence, window, sinks)
    counts = torch.zeros(3, dtype=torch.long, device=sequence.start.device)  # read once: a GPU is waited for
    for rows in row_blocks(sequence.start.shape[1], block):
        mask = unpadded_mask(sequence, rows)
        distant = mask & ~local_mask(sequence, rows, rows.stop, window, sinks)
        kept = distant if selection is None else torch.zeros_like(distant)
        if selection is not None and selection.query_groups is not None:
            kept = distant & group_mask(selection, rows, rows.stop)
        counts += torch.stack([mask.sum(), distant.sum(), kept.sum()])
    return PairCounts(*counts.tolist())


def count_unpadded_pairs(selection: Selection | None, sequence: Sequence, window: int, sinks: int) -> PairCounts:
    """Count the pairs of causal sequences without padding in time O(T * (sinks + distinct key memberships))."""
    batch, length = sequence.start.shape
    reach = min(sequence.reach or length, length)
    width = min(window + 1, reach)
    total = batch * reach * (2 * length - reach + 1) // 2
    # of each sink the queries that see it beyond their window
    distant_sinks = [slice(s + width, min(s + reach, length)) for s in range(min(sinks, length - width))]
    local = sum(length - d for d in range(width)) + sum(x.stop - x.start for x in distant_sinks)
    distant = total - batch * local
    if selection is None:
        return PairCounts(total, distant, distant)
    if selection.query_groups is None or selection.key_groups is None:
        return PairCounts(total, distant, 0)
    queries, keys = selection.query_groups, selection.key_groups
    kept = torch.zeros((), dtype=torch.long, device=keys.device)
    for members in distinct_memberships(selection):
        seen = (keys == members).all(-1).cumsum(1)  # (B, T), keys with these memberships up to each query
        gone = F.pad(seen[:, : length - reach], (reach - width, 0))  # those that are out of reach
        kept += ((seen[:, : length - width] - gone) * (queries[:, width:] & members).any(-1)).sum()
    for s, rows in enumerate(distant_sinks):
        kept -= (queries[:, rows] & keys[:, s, None]).any(-1).sum()
    return PairCounts(total, distant, int(kept))


def distinct_memberships(selection: Selection) -> Tensor:
    """Return `(n, K)` bool, the distinct memberships that keys have."""
    keys = selection.key_groups
    assert keys is not None
    if selection.max_groups is not None and selection.max_groups[1] == 1:
        return torch.eye(keys.shape[-1], dtype=torch.bool, device=keys.device)
    return keys.flatten(0, 1).unique(dim=0)


def group_sizes(selection: Selection, sequence: Sequence) -> Tensor:
    """Return `(n, K)` int, tokens per group as keys without padding, for each of n heads with its own groups."""
    keys = selection.key_groups
    assert keys is not None
    keys = keys if keys.ndim == 4 else keys[:, None]
    return (keys if sequence.valid is None else keys & sequence.valid[:, None, :, None]).sum((0, 2))
