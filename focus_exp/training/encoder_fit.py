"""Fit the two encoders of `focus_dual` without a pass through the model, layer by layer, to what its pairs are worth.

Keys start as balanced clusters of the layer's own keys. Then both encoders descend together: the query's distribution
over groups is to be that of its important keys, whose groups are soft and kept even by a potential, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from focus_exp.attention.baselines.top_tokens import TokenIndexer
from focus_exp.attention.dual import FocusDual
from focus_exp.attention.routing import balance_potential
from focus_exp.training.importance import Observed

CLUSTERED = 8192  # tokens
HEAVIEST = 5.0  # times the mean importance of a query: a few would decide everything
WORTHIEST, WORTH_DECAY = 50.0, 0.1  # the same of what a query is worth, which few numbers are to tell
SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0)
DECAY = 1e-3  # of squared weights: what pairs are worth is noisy, and a classifier learns noise by heart


@dataclass
class Block:
    """A text of T tokens as a layer's encoders see it; n heads with groups of their own.

    tokens: `[1, T, E]` standardised. keys, share: `[n, T, M]`; total: `[n, T]`, see `Observed`.
    """

    tokens: Tensor
    keys: Tensor
    share: Tensor
    total: Tensor

    def worth(self, memberships: Tensor) -> Tensor:
        """Share of each query's importance in every group `[n, T, K]`, by the keys' memberships `[n, T, K]`."""
        return torch.stack([WeightedSums.apply(*both) for both in zip(memberships, *self.lists, strict=True)])

    @cached_property
    def lists(self) -> tuple[list[Lists], list[Lists]]:
        """By head, each query's keys with their shares; and each key's queries with theirs."""
        by_query, by_key = [], []
        for keys, share in zip(self.keys, self.share, strict=True):
            queries, _ = torch.nonzero(share, as_tuple=True)
            keys, share = keys[share > 0], share[share > 0]
            by_query.append(lists_of(queries, keys, share, len(self.keys[0])))
            order = keys.argsort(stable=True)
            by_key.append(lists_of(keys[order], queries[order], share[order], len(self.keys[0])))
        return by_query, by_key


class Lists(NamedTuple):
    """Of each of T rows, the rows of another matrix `[L]` that it adds up, by their weights `[L]`, and where its list
    starts `[T]`."""

    rows: Tensor
    starts: Tensor
    weights: Tensor

    def sums(self, x: Tensor) -> Tensor:
        """Of the rows of x `[T, K]`, `[T, K]`."""
        return F.embedding_bag(self.rows, x, self.starts, per_sample_weights=self.weights.to(x.dtype), mode="sum")


def lists_of(owners: Tensor, rows: Tensor, weights: Tensor, count: int) -> Lists:
    """The lists of `count` owners, of entries in the order of their owners, all `[L]`."""
    return Lists(rows, torch.searchsorted(owners, torch.arange(count, device=owners.device)), weights)


class WeightedSums(torch.autograd.Function):
    """`Lists.sums` forward and, by the transposed lists, back: torch's own gradient sorts the list at every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lists: Lists, transposed: Lists) -> Tensor:
        ctx.transposed = transposed
        return lists.sums(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed.sums(gradient.contiguous()), None, None


@torch.no_grad()
def standardise(method: FocusDual | TokenIndexer, observed: list[Observed]) -> None:
    """Let `method` see the tokens of these texts with mean 0 and deviation 1."""
    hidden = torch.cat([x.hidden for x in observed]).float()
    method.mean.copy_(hidden.mean(0))
    method.scale.copy_(hidden.std(0) + 1e-4)


def tokens_of(observed: Observed, method: FocusDual | TokenIndexer) -> Tensor:
    """`[T, E]` standardised."""
    return (observed.hidden.float().to(method.mean.device) - method.mean) / method.scale


def block_of(observed: Observed, method: FocusDual) -> Block:
    tokens = tokens_of(observed, method)
    keys, share, total = observed.keys.long(), observed.share.float(), observed.total
    if method.heads == 1 and total.shape[1] > 1:
        of_all = total.sum(1, keepdim=True)
        part = (total / of_all.clamp(min=torch.finfo(torch.float32).tiny))[..., None]
        keys, share, total = keys.flatten(1)[:, None], (share * part).flatten(1)[:, None], of_all
    keys, share, total = (x.transpose(0, 1).contiguous().to(tokens.device) for x in (keys, share, total))
    return Block(tokens[None], keys, share, total)


def fit_encoders(method: FocusDual, observed: list[Observed], steps: int, generator: torch.Generator) -> None:
    """Fit `method` to the blocks of one layer."""
    standardise(method, observed)
    blocks = [block_of(x, method) for x in observed]
    vectors = torch.cat([x.vectors for x in observed]).float().transpose(0, 1).to(method.mean.device)
    labels = balanced_clusters(vectors if method.heads > 1 else merged(vectors), method.groups, generator)
    with torch.enable_grad():
        classify(
            method.key_encoder, blocks, labels.split([b.tokens.shape[1] for b in blocks], 1), steps // 4, generator
        )
        groups = [F.one_hot(x, method.groups).float() for x in labels.split([b.tokens.shape[1] for b in blocks], 1)]
        descend(method, blocks, steps // 4, generator, groups)
        descend(method, blocks, steps, generator)
        expect(method, blocks, steps)
    with torch.no_grad():
        balance(method, torch.cat([method.key_encoder(block.tokens)[0] for block in blocks], 1).log_softmax(-1))


def merged(vectors: Tensor) -> Tensor:
    """Keys of all heads `[G, N, D]` as those of one `[1, N, G * D]`."""
    return vectors.transpose(0, 1).flatten(1)[None]


@torch.no_grad()
def balanced_clusters(vectors: Tensor, groups: int, generator: torch.Generator) -> Tensor:
    """Labels `[n, N]` of equally large groups of vectors `[n, N, D]` by the cosine to their means."""
    x = F.normalize(vectors - vectors.mean(1, keepdim=True), dim=-1)
    some = x[:, torch.randperm(x.shape[1], generator=generator)[:CLUSTERED]]
    centres = some[:, :groups]
    if centres.shape[1] < groups:
        raise ValueError(f"{x.shape[1]} tokens cannot start {groups} groups; fit to longer or more blocks of text")
    for _ in range(10):
        labels = evenly(some, centres)
        members = F.one_hot(labels, groups).to(x.dtype)
        centres = F.normalize(members.transpose(-1, -2) @ some + 1e-6, dim=-1)
    return evenly(x, centres)


def evenly(x: Tensor, centres: Tensor) -> Tensor:
    similarities = 10 * x @ centres.transpose(-1, -2)
    return (similarities + even_potential(similarities, 10, SHARPNESS[:3])[:, None]).argmax(-1)


def even_potential(logits: Tensor, rounds: int, sharpness: tuple[float, ...]) -> Tensor:
    """`[n, K]`: what gives groups of logits `[n, N, K]` equal shares, of hard groups the more exactly the sharper."""
    potentials = []
    for of_head in logits:
        potential = torch.zeros_like(of_head[0])
        for s in sharpness:
            potential = balance_potential(of_head, potential, rounds, sharpness=s)
        potentials.append(potential)
    return torch.stack(potentials)


def classify(
    encoder: nn.Module, blocks: list[Block], labels: tuple[Tensor, ...], steps: int, generator: torch.Generator
) -> None:
    """Teach `encoder` the labels `[n, T]` of every block."""
    optimizer, schedule = adam(list(encoder.parameters()), 0.02, steps)
    for _ in range(steps):
        index = int(torch.randint(len(blocks), (), generator=generator))
        logits = encoder(blocks[index].tokens)[0]
        update(optimizer, schedule, F.cross_entropy(logits.flatten(0, 1), labels[index].flatten()))


def descend(
    method: FocusDual,
    blocks: list[Block],
    steps: int,
    generator: torch.Generator,
    groups: list[Tensor] | None = None,
) -> None:
    """Lower the cross-entropy of queries' group distributions to where their importance lies, by the queries' encoder
    and, unless memberships `groups` `[n, T, K]` are given, the keys'."""
    encoders = [method.asking] if groups else dict.fromkeys([method.asking, method.key_encoder])
    parameters = [p for encoder in encoders for p in encoder.parameters()]
    optimizer, schedule = adam(parameters, 0.02 if groups else 0.005, steps)
    potential: Tensor | None = None
    for step in range(steps):
        index = int(torch.randint(len(blocks), (), generator=generator))
        block = blocks[index]
        if groups is None:
            sharpness = 1 + 3 * step / steps  # towards the hard groups of use
            logits = method.key_encoder(block.tokens)[0] * sharpness
            with torch.no_grad():
                start = torch.zeros_like(logits[:, 0]) if potential is None else potential * sharpness
                now = torch.stack([balance_potential(x, p, 3) for x, p in zip(logits, start, strict=True)]) / sharpness
                potential = now if potential is None else potential.lerp(now, 0.2)
            members = (logits + (potential * sharpness)[:, None]).softmax(-1)
        else:
            members = groups[index]
        asked = method.asking(block.tokens)[0].log_softmax(-1)
        weight = (block.total / block.total.mean(1, keepdim=True).clamp(min=1e-30)).clamp(max=HEAVIEST)
        loss = -(weight[..., None] * block.worth(members) * asked).sum() / weight.sum().clamp(min=1e-6)
        decay = sum(p.square().sum() for p in parameters if p.ndim > 2)
        update(optimizer, schedule, loss + DECAY * decay)


def expect(method: FocusDual, blocks: list[Block], steps: int) -> None:
    """Fit what a query's distant keys are worth together, against their mean, by Poisson regression on its token."""
    weight, bias = (nn.Parameter(torch.zeros_like(x)) for x in (method.worth, method.worth_bias))
    totals = torch.cat([block.total for block in blocks], 1)
    scale = totals.mean(1, keepdim=True).clamp(min=torch.finfo(totals.dtype).tiny)
    optimizer, schedule = adam([weight, bias], 0.01, steps)
    for step in range(steps):
        block = blocks[step % len(blocks)]
        worth = (block.total / scale).clamp(max=WORTHIEST)
        expected = (block.tokens[0] @ weight.T + bias).T.clamp(-8, 8)
        loss = (expected.exp() - worth * expected).mean()
        update(optimizer, schedule, loss + WORTH_DECAY * weight.square().sum() / len(weight))
    method.worth.copy_(weight.detach())
    method.worth_bias.copy_(bias.detach())


@torch.no_grad()
def thresholds(promises: Tensor) -> Tensor:
    """What groups have to promise `[n, K - 1]` that queries with these promises `[n, N, K]` read k of them on average,
    for k = 1 to K - 1."""
    ranked = promises.flatten(1).sort(-1, descending=True).values
    return ranked[:, torch.arange(1, promises.shape[2], device=ranked.device) * promises.shape[1]]


@torch.no_grad()
def thresholds_by(method: FocusDual, counts: str, observed: list[Observed]) -> Tensor:
    """The thresholds of a fitted `method` for queries that read as `counts` says."""
    texts = [tokens_of(x, method)[None] for x in observed]
    places = [torch.arange(x.shape[1], device=x.device)[None] for x in texts]
    promises = [method.weighed(counts, method.promises(x), place)[0] for x, place in zip(texts, places, strict=True)]
    return thresholds(torch.cat(promises, 1))


def adam(
    parameters: list[nn.Parameter], rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.98))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))


def update(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()


@torch.no_grad()
def balance(method: FocusDual, logits: Tensor) -> None:
    """Make the groups of keys with these log-probabilities `[n, N, K]` alike in size, by their encoder's bias.

    Not the hard ones: the largest still holds about five times the mean. Evener ones keep less of what matters.
    """
    method.key_encoder.bias.add_(even_potential(logits, 30, SHARPNESS))
