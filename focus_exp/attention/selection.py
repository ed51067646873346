"""Which pairs of tokens are kept: window, sinks, and membership in groups; as a predicate and as counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """Where the tokens of a batch lie.

    start: `[B, T]` int, the index of the first token of each token's own sequence, see `starts`.
    valid: `[B, T]` bool, False on padding; None when there is none.
    allowed: `[B or 1, 1, T, T]` bool, what the base model lets a query see, where that is not simply what is neither
        in the future nor padding (sliding layers, chunks, packed sequences).
    order: `[B, T]` int, where each token stood before padding inside a row was moved behind its tokens; None if
        nothing was moved. Windows and sinks then count the tokens of a row, as if the row were alone.
    kept: `[B, past]` bool, which cached tokens the mask still shows; None if all.
    """

    start: Tensor
    valid: Tensor | None = None
    allowed: Tensor | None = None
    order: Tensor | None = None
    kept: Tensor | None = None

    @cached_property
    def last_start(self) -> int:
        """Of the sequences; all layers ask for it, and a device is waited for once."""
        return int(self.start.max())

    def valid_or_all(self) -> Tensor:
        """Return `valid`, all True where there is no padding."""
        return torch.ones_like(self.start, dtype=torch.bool) if self.valid is None else self.valid

    @staticmethod
    def plain(batch: int, length: int, device: torch.device | str = "cpu") -> Sequence:
        return Sequence(start=torch.zeros(batch, length, dtype=torch.long, device=device))

    def repeated(self, times: int) -> Sequence:
        """Every row so many times, one after the other."""
        start, valid, allowed = (
            x if x is None or len(x) < len(self.start) else x.repeat_interleave(times, 0)
            for x in (self.start, self.valid, self.allowed)
        )
        assert start is not None
        return Sequence(start, valid, allowed)


@dataclass(frozen=True)
class Selection:
    """What a method selected for one layer. Each tensor may have a dimension of key/value heads too, `[B, G, T, ...]`.

    assignment: `[B, T, K]` soft distribution over groups, or None for a method without routing.
    query_groups, key_groups: `[B, T, K]` bool memberships for hard selection, or None to gate softly.
    group: `[B, T]` int where a token has one group alone, as query and as key.
    keeps_all: the memberships leave out no pair, whatever the tokens.
    key_assignment: of a token as key, where that is another than the one as query.
    most: at most so many groups of a token as query and as key; None where it may be all.
    """

    assignment: Tensor | None = None
    query_groups: Tensor | None = None
    key_groups: Tensor | None = None
    group: Tensor | None = None
    keeps_all: bool = False
    key_assignment: Tensor | None = None
    most: tuple[int, int] | None = None

    @property
    def is_soft(self) -> bool:
        """Tell soft routing, whose gates weigh every pair, from hard routing and from no routing."""
        return self.assignment is not None and self.query_groups is None

    @property
    def assignment_of_keys(self) -> Tensor:
        """`[B, T, K]`; that of queries where there is one for both."""
        both = self.assignment if self.key_assignment is None else self.key_assignment
        assert both is not None
        return both


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
    """Let attention with one grouping a row serve one for each key/value head, folded into the batch."""

    @wraps(attention)
    def attend(
        q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs, *more: Any,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        selection, sequence, heads = by_head(selection, sequence)
        if heads == 1:
            return attention(q, k, v, selection, sequence, args, *more, **options)
        if args.sink_logits is not None:
            args = replace(args, sink_logits=args.sink_logits.view(heads, -1).repeat(len(q), 1))
        rows = [x.unflatten(1, (heads, -1)).flatten(0, 1) for x in (q, k, v)]
        return attention(*rows, selection, sequence, args, *more, **options).unflatten(0, (-1, heads)).flatten(1, 2)

    return attend


def by_head(selection: Selection, sequence: Sequence) -> tuple[Selection, Sequence, int]:
    """Groups `[B, G, T, ...]` of each key/value head as those of B * G rows, and G; 1 where all heads share theirs."""
    tensors = {name: x for name, x in vars(selection).items() if isinstance(x, Tensor)}
    own = {name for name, x in tensors.items() if x.ndim == (3 if name == "group" else 4)}
    if not own:
        return selection, sequence, 1
    heads = max(tensors[name].shape[1] for name in own)

    def rows(name: str, x: Tensor) -> Tensor:
        x = x if name in own else x[:, None]
        return x.expand(-1, heads, *x.shape[2:]).flatten(0, 1)

    of_rows: dict[str, Any] = {name: rows(name, x) for name, x in tensors.items()}
    selection = replace(selection, **of_rows)
    return selection, sequence if heads == 1 else sequence.repeated(heads), heads


def starts(first: Tensor, past: int = 0, before: Tensor | int = 0) -> Tensor:
    """`[B, T]` int, where the sequence of each token begins: at a token that sees none before itself.

    first: `[B, T]` int, the first token that each one sees. The tokens stand at `past` and after; the sequence of those
    before them began at `before` `[B, 1]`.
    """
    place = torch.arange(past, past + first.shape[1], device=first.device)
    begun = torch.where(first == place, place, before)
    return begun.cummax(1).values


def order_by(key: Tensor) -> Tensor:
    """Return `[B, T]` int, the stable order of a bool key `[B, T]`: False first."""
    return key.byte().argsort(dim=1, stable=True)


def take(x: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """Reorder dimension `dim` of x `[B, ...]`, each row by its own `order` `[B, T]`."""
    if order is None:
        return x
    shape = [1] * x.ndim
    shape[0], shape[dim] = order.shape
    return x.gather(dim, order.view(shape).expand(*x.shape[:dim], order.shape[1], *x.shape[dim + 1 :]))


def nothing_shared(sequence: Sequence) -> Selection:
    """Window and sinks alone, as memberships: one group that every token asks and no token answers from."""
    asks = torch.ones(*sequence.start.shape, 1, dtype=torch.bool, device=sequence.start.device)
    return Selection(query_groups=asks, key_groups=torch.zeros_like(asks))


def top_k_groups(assignment: Tensor, k: int) -> Tensor:
    """Membership `[B, T, K]` bool of the k largest entries, ties to the lowest index."""
    order = torch.argsort(assignment, dim=-1, descending=True, stable=True)[..., :k]
    return torch.zeros_like(assignment, dtype=torch.bool).scatter_(-1, order, True)


def select(assignment: Tensor, top_k: int, pair_rule: str) -> Selection:
    """Hard selection. Rule "share": a pair is kept if the two top-k sets meet (eq. 3). Rule "query_topk": if the
    key's first group is among the query's top-k; under balance exactly k/K of the pairs."""
    group = assignment.argmax(-1)  # the lowest of the largest
    first = torch.zeros_like(assignment, dtype=torch.bool).scatter_(-1, group[..., None], True)
    if top_k == 1:
        return Selection(assignment, first, first, group, keeps_all=assignment.shape[-1] == 1)
    query_groups = top_k_groups(assignment, top_k)
    key_groups = query_groups if pair_rule == "share" else first
    most = (top_k, top_k if pair_rule == "share" else 1)
    everything = keeps_all(assignment.shape[-1], top_k, pair_rule)
    return Selection(assignment, query_groups, key_groups, keeps_all=everything, most=most)


def keeps_all(groups: int, top_k: int, pair_rule: str) -> bool:
    """Whether every pair is kept whatever the tokens: two sets of k out of K groups always meet where 2k > K."""
    return top_k >= groups or (pair_rule == "share" and 2 * top_k > groups)


def causal(rows: slice, length: int, device: torch.device) -> Tensor:
    """`[rows, T]` bool, j <= i."""
    return torch.arange(rows.start, rows.stop, device=device)[:, None] >= torch.arange(length, device=device)


def mask_of(sequence: Sequence) -> Tensor | None:
    """What `full_attention` takes: `[B or 1, 1, T, T]`, or `[B, 1, 1, T]` where there is padding alone, or None."""
    if sequence.allowed is not None or sequence.valid is None:
        return sequence.allowed
    return sequence.valid[:, None, None]


def always_visible(sequence: Sequence, rows: slice, length: int, window: int, sinks: int) -> Tensor:
    """`[B, rows, T]` bool: i - j <= window, or j among the first `sinks` tokens of i's own sequence."""
    start = sequence.start[:, rows, None]
    i = torch.arange(rows.start, rows.stop, device=start.device)[:, None]
    return near_or_sink(i, torch.arange(length, device=start.device), start, window, sinks)


def near_or_sink(i: Tensor, j: Tensor, start: Tensor, window: int, sinks: int) -> Tensor:
    """Whether query i sees key j for its place alone; `start`: of the query's own sequence."""
    return (i - j <= window) | ((j >= start) & (j < start + sinks))


def permitted(sequence: Sequence, rows: slice, length: int) -> Tensor:
    """`[B or 1, rows, T]` bool: what the base model itself lets these queries see."""
    if sequence.allowed is not None:
        return sequence.allowed[:, 0, rows, :length]
    mask = causal(rows, length, sequence.start.device)[None]
    return mask if sequence.valid is None else mask & sequence.valid[:, None, :length]


def permitted_or_self(sequence: Sequence, rows: slice, length: int) -> Tensor:
    """`permitted`, and every query itself: padding queries too, so that no row of a softmax is empty."""
    return permitted(sequence, rows, length) | itself(rows, length, sequence.start.device)


def itself(rows: slice, length: int, device: torch.device) -> Tensor:
    """`[rows, T]` bool, j = i."""
    return torch.arange(rows.start, rows.stop, device=device)[:, None] == torch.arange(length, device=device)


def real_pairs(sequence: Sequence, rows: slice) -> Tensor:
    """`[B, rows, S]` bool: what the base model lets these queries see of the keys up to their end, padding left out."""
    seen = permitted(sequence, rows, rows.stop)
    if sequence.valid is not None:
        seen = seen & sequence.valid[:, rows, None] & sequence.valid[:, None, : rows.stop]
    return seen.expand(len(sequence.start), -1, -1)


def same_group(selection: Selection, rows: slice, length: int) -> Tensor:
    """`[B, rows, T]` bool: query and key share a group under the selection's memberships."""
    assert selection.query_groups is not None and selection.key_groups is not None
    query_groups, key_groups = selection.query_groups[:, rows], selection.key_groups[:, :length]
    return query_groups.float() @ key_groups.float().transpose(-1, -2) > 0


def row_blocks(length: int, size: int) -> Iterator[slice]:
    """Blocks of queries; a causal block needs only the keys up to its own end."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


@dataclass(frozen=True)
class PairCounts:
    """Numbers of causal query-key pairs: all, those beyond window and sinks, and those of them that are kept."""

    total: int
    distant: int
    distant_kept: int

    @property
    def share_kept(self) -> float:
        """Of all pairs."""
        return (self.total - self.distant + self.distant_kept) / self.total


def count_pairs(
    selection: Selection | None, sequence: Sequence, window: int, sinks: int, block: int = 512
) -> PairCounts:
    """Counts over a batch, padding left out, by the same predicates as the attention itself.

    A selection without memberships (window only) keeps no distant pair; None keeps them all. Where key/value heads have
    memberships of their own, pairs count for each of those heads.
    """
    if selection is not None:
        selection, sequence, _ = by_head(selection, sequence)
    if sequence.allowed is None and sequence.valid is None and not bool(sequence.start.any()):
        return count_plain_pairs(selection, sequence, window, sinks)
    counts = torch.zeros(3, dtype=torch.long, device=sequence.start.device)  # read once, for a GPU is waited for
    for rows in row_blocks(sequence.start.shape[1], block):
        seen = real_pairs(sequence, rows)
        far = seen & ~always_visible(sequence, rows, rows.stop, window, sinks)
        kept = far if selection is None else torch.zeros_like(far)
        if selection is not None and selection.query_groups is not None:
            kept = far & same_group(selection, rows, rows.stop)
        counts += torch.stack([seen.sum(), far.sum(), kept.sum()])
    return PairCounts(*counts.tolist())


def count_plain_pairs(selection: Selection | None, sequence: Sequence, window: int, sinks: int) -> PairCounts:
    """The same for plain causal sequences, in time O(T * (sinks + distinct memberships of keys))."""
    batch, length = sequence.start.shape
    total = batch * length * (length + 1) // 2
    width = min(window + 1, length)
    far_sinks = [(s, max(length - s - window - 1, 0)) for s in range(min(sinks, length))]
    near = sum(length - d for d in range(width)) + sum(count for _, count in far_sinks)
    distant = total - batch * near
    if selection is None:
        return PairCounts(total, distant, distant)
    if selection.query_groups is None or selection.key_groups is None:
        return PairCounts(total, distant, 0)
    queries, keys = selection.query_groups, selection.key_groups
    kept = torch.zeros((), dtype=torch.long, device=keys.device)
    for members in memberships(selection):
        seen = (keys == members).all(-1).cumsum(1)  # [B, T] keys of this kind up to each query
        kept += (seen[:, : length - width] * (queries[:, width:] & members).any(-1)).sum()
    for s, count in far_sinks:
        kept -= (queries[:, length - count :] & keys[:, s, None]).any(-1).sum()
    return PairCounts(total, distant, int(kept))


def group_sizes(selection: Selection, sequence: Sequence) -> Tensor:
    """`[n, K]` int, tokens in each group as keys, padding left out, for each head with groups of its own."""
    keys = selection.key_groups
    assert keys is not None
    keys = keys if keys.ndim == 4 else keys[:, None]
    return (keys if sequence.valid is None else keys & sequence.valid[:, None, :, None]).sum((0, 2))


def memberships(selection: Selection) -> Tensor:
    """`[kinds, K]` bool, the memberships that keys have."""
    keys = selection.key_groups
    assert keys is not None
    if selection.group is not None or (selection.most is not None and selection.most[1] == 1):
        return torch.eye(keys.shape[-1], dtype=torch.bool, device=keys.device)
    return keys.flatten(0, 1).unique(dim=0)
