"""Fit the two encoders of a layer to the importance of its pairs, without passes through the model.

1. Cluster the layer's keys into groups of equal size, and teach the key encoder these labels.
2. Teach the query encoder which of these groups hold a query's important keys.
3. Train both together on that cross-entropy, with soft groups that a bias keeps balanced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.router import equalize
from focus_exp.errors import UserError
from focus_exp.fitting.importance import Observation

CLUSTERED_TOKENS = 8192
BALANCED_TOKENS = 8192  # spread over all
MAX_WEIGHT = 5.0  # of a query, times the mean: a few would decide everything
MAX_VALUE, VALUE_DECAY = 50.0, 0.1  # the same for a query's total importance, and the decay of its regression
SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0)
PRETRAINING_RATE = 0.02  # learning rate on the cluster labels
DECAY = 1e-3  # of squared weights: importance is noisy, and a classifier memorizes noise


class SparseMatrix(NamedTuple):
    """Sparse `(T, T)` matrix as embedding bags: column indices, row offsets `(T,)` and values."""

    columns: Tensor
    offsets: Tensor
    values: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        weights = self.values.to(x.dtype)
        return F.embedding_bag(self.columns, x, self.offsets, per_sample_weights=weights, mode="sum")


def make_sparse(rows: Tensor, columns: Tensor, values: Tensor, count: int) -> SparseMatrix:
    """Build from entries in ascending order of their rows."""
    return SparseMatrix(columns, torch.searchsorted(rows, torch.arange(count, device=rows.device)), values)


class SparseMatmul(torch.autograd.Function):
    """Constant sparse matrix times x. Its gradient uses the transpose; torch's own sorts at every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: SparseMatrix, transpose: SparseMatrix) -> Tensor:
        ctx.transpose = transpose
        return matrix.matmul(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose.matmul(gradient.contiguous()), None, None


@dataclass
class FitSequence:
    """A sequence as the encoders see it, with n routed heads.

    Args:
        tokens: `(1, T, E)`, standardized hidden states.
        keys, fractions: `(n, T, M)`; total: `(n, T)`; see `Observation`.
    """

    tokens: Tensor
    keys: Tensor
    fractions: Tensor
    total: Tensor

    @classmethod
    def of(cls, observation: Observation, method: FocusDual) -> FitSequence:
        tokens = standardized_tokens(observation, method)
        keys, fractions, total = observation.keys.long(), observation.fractions.float(), observation.total
        if method.heads == 1 and total.shape[1] > 1:
            over_heads = total.sum(1, keepdim=True)
            of_head = (total / over_heads.clamp(min=torch.finfo(torch.float32).tiny))[..., None]
            keys, fractions, total = keys.flatten(1)[:, None], (fractions * of_head).flatten(1)[:, None], over_heads
        keys, fractions, total = (x.transpose(0, 1).contiguous().to(tokens.device) for x in (keys, fractions, total))
        return cls(tokens[None], keys, fractions, total)

    def group_importance(self, members: Tensor) -> Tensor:
        """Return the fraction of each query's importance in every group, for key memberships, both `(n, T, K)`."""
        return torch.stack([SparseMatmul.apply(x, *pair) for x, pair in zip(members, self.matrices, strict=True)])

    @cached_property
    def matrices(self) -> list[tuple[SparseMatrix, SparseMatrix]]:
        """Importance fractions of queries by keys and their transpose, by head."""
        pairs, length = [], self.keys.shape[1]
        for keys, fractions in zip(self.keys, self.fractions, strict=True):
            queries, _ = torch.nonzero(fractions, as_tuple=True)
            columns, values = keys[fractions > 0], fractions[fractions > 0]
            matrix = make_sparse(queries, columns, values, length)
            order = columns.argsort(stable=True)
            pairs.append((matrix, make_sparse(columns[order], queries[order], values[order], length)))
        return pairs


@torch.no_grad()
def standardize(method: Any, observations: list[Observation]) -> None:
    """Set the mean and scale with which `method` sees hidden states."""
    hidden = torch.cat([x.hidden for x in observations]).float()
    method.mean.copy_(hidden.mean(0))
    method.scale.copy_(hidden.std(0) + 1e-4)


def standardized_tokens(observation: Observation, method: Any) -> Tensor:
    """Return hidden states `(T, E)` of mean 0 and deviation 1."""
    return (observation.hidden.float().to(method.mean.device) - method.mean) / method.scale


def fit_encoders(
    method: FocusDual,
    observations: list[Observation],
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
    ignored_means: int = 0,
) -> None:
    """Fit a `standardize`d method to the observations of its layer; see the module's three steps.

    Args:
        ignored_means: number of directions, in which sequences differ on average, that the encoders do not see: groups
            that follow the kind of text rather than the token say little within a text.
    """
    sequences = [FitSequence.of(x, method) for x in observations]
    directions = mean_directions([x.tokens[0] for x in sequences], ignored_means)
    for sequence in sequences:
        sequence.tokens = remove_directions(sequence.tokens, directions)
    vectors = torch.cat([x.vectors for x in observations]).float().transpose(0, 1).to(method.mean.device)
    if method.heads == 1:
        vectors = vectors.transpose(0, 1).flatten(1)[None]
    labels = cluster_keys(vectors, method.groups, generator).split([x.tokens.shape[1] for x in sequences], 1)
    fit_key_encoder(method.key_encoder, sequences, labels, steps // 4, generator)
    members = [F.one_hot(x, method.groups).float() for x in labels]
    fit_routing(method, sequences, steps // 4, PRETRAINING_RATE, generator, members)
    fit_routing(method, sequences, steps, learning_rate, generator)
    fit_value(method, sequences, steps)
    with torch.no_grad():
        for weight in (*(p for p in method.parameters() if p.ndim > 2), method.worth):
            weight.copy_(remove_directions(weight, directions))
        balance_keys(method, torch.cat([method.key_encoder(x.tokens)[0] for x in sequences], 1).log_softmax(-1))


@torch.no_grad()
def mean_directions(sequences: list[Tensor], count: int) -> Tensor:
    """Return the first `count` principal directions `(count, E)` of the means of sequences `(T, E)`."""
    means = torch.stack([x.mean(0) for x in sequences])
    return torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[:count]


def remove_directions(x: Tensor, directions: Tensor) -> Tensor:
    """Return x `(..., E)` without its parts along orthonormal directions `(n, E)`."""
    return x - x @ directions.T @ directions if len(directions) else x


@torch.no_grad()
def cluster_keys(vectors: Tensor, groups: int, generator: torch.Generator) -> Tensor:
    """Label vectors `(n, N, D)` with K groups of equal size by cosine similarity, `(n, N)`."""
    x = F.normalize(vectors - vectors.mean(1, keepdim=True), dim=-1)
    sample = x[:, torch.randperm(x.shape[1], generator=generator)[:CLUSTERED_TOKENS]]
    centers = sample[:, :groups]
    if centers.shape[1] < groups:
        raise UserError(
            f"attention.groups must be at most {x.shape[1]}, the tokens of the fit (got {groups}). Use longer or more "
            "sequences, or fewer groups."
        )
    for _ in range(10):
        members = F.one_hot(assign_evenly(sample, centers), groups).to(x.dtype)
        centers = F.normalize(members.transpose(-1, -2) @ sample + 1e-6, dim=-1)
    return assign_evenly(x, centers, sample)


def assign_evenly(x: Tensor, centers: Tensor, balanced: Tensor | None = None) -> Tensor:
    """Label vectors by their center, which have as many each; `balanced`: of these vectors, where x is large."""
    similarity = 10 * x @ centers.transpose(-1, -2)
    of_sample = similarity if balanced is None else 10 * balanced @ centers.transpose(-1, -2)
    return (similarity + balancing_bias(of_sample, 10, SHARPNESS[:3])[:, None]).argmax(-1)


def balancing_bias(logits: Tensor, iterations: int, sharpness: tuple[float, ...]) -> Tensor:
    """Return the bias `(n, K)` that gives the groups of logits `(n, N, K)` equal mass; the sharper, the harder."""
    bias = torch.zeros_like(logits[:, 0])
    for s in sharpness:
        bias = equalize(logits, bias, iterations, s)
    return bias


def fit_key_encoder(
    encoder: nn.Module,
    sequences: list[FitSequence],
    labels: tuple[Tensor, ...],
    steps: int,
    generator: torch.Generator,
) -> None:
    """Train `encoder` to predict the labels `(n, T)` of each sequence."""

    def loss(step: int) -> Tensor:
        index = draw_index(len(sequences), generator)
        logits = encoder(sequences[index].tokens)[0]
        return F.cross_entropy(logits.flatten(0, 1), labels[index].flatten())

    minimize(loss, list(encoder.parameters()), PRETRAINING_RATE, steps)


def fit_routing(
    method: FocusDual,
    sequences: list[FitSequence],
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
    members: list[Tensor] | None = None,
) -> None:
    """Train queries' group distributions towards the distribution of their importance over groups.

    Args:
        members: memberships `(n, T, K)` of keys by sequence; without them the key encoder is trained too.
    """
    encoders = [method.q_encoder] if members else dict.fromkeys([method.q_encoder, method.key_encoder])
    parameters = [p for encoder in encoders for p in encoder.parameters()]
    bias: Tensor | None = None

    def soft_members(tokens: Tensor, sharpness: float) -> Tensor:
        nonlocal bias
        logits = method.key_encoder(tokens)[0] * sharpness
        with torch.no_grad():
            start = torch.zeros_like(logits[:, 0]) if bias is None else bias * sharpness
            now = equalize(logits, start, 3) / sharpness
            bias = now if bias is None else bias.lerp(now, 0.2)
        return (logits + (bias * sharpness)[:, None]).softmax(-1)

    def loss(step: int) -> Tensor:
        index = draw_index(len(sequences), generator)
        sequence = sequences[index]
        # sharper from step to step, towards hard routing
        groups = members[index] if members else soft_members(sequence.tokens, 1 + 3 * step / steps)
        target = sequence.group_importance(groups)
        log_p = method.q_encoder(sequence.tokens)[0].log_softmax(-1)
        weight = query_weights(sequence.total, sequence.total.mean(1, keepdim=True))
        entropy = -(weight[..., None] * target * log_p).sum() / weight.sum().clamp(min=1e-6)
        return entropy + DECAY * sum(p.square().sum() for p in parameters if p.ndim > 2)

    minimize(loss, parameters, learning_rate, steps)


def query_weights(total: Tensor, mean: Tensor) -> Tensor:
    """Return a query's importance relative to the mean, clipped to MAX_WEIGHT."""
    return (total / mean.clamp(min=1e-30)).clamp(max=MAX_WEIGHT)


def fit_value(method: FocusDual, sequences: list[FitSequence], steps: int) -> None:
    """Fit the log of a query's total importance, relative to the mean, by Poisson regression on its token."""
    weight, bias = (nn.Parameter(torch.zeros_like(x)) for x in (method.worth, method.worth_bias))
    totals = torch.cat([x.total for x in sequences], 1)
    scale = totals.mean(1, keepdim=True).clamp(min=torch.finfo(totals.dtype).tiny)

    def loss(step: int) -> Tensor:
        sequence = sequences[step % len(sequences)]
        value = (sequence.total / scale).clamp(max=MAX_VALUE)
        log_value = (sequence.tokens[0] @ weight.T + bias).T.clamp(-8, 8)
        return (log_value.exp() - value * log_value).mean() + VALUE_DECAY * weight.square().sum() / len(weight)

    minimize(loss, [weight, bias], 0.01, steps)
    method.worth.copy_(weight.detach())
    method.worth_bias.copy_(bias.detach())


@torch.no_grad()
def score_thresholds(scores: Tensor) -> Tensor:
    """Return the thresholds `(n, K - 1)` that k = 1 to K - 1 of a query's scores `(n, N, K)` pass on average."""
    ranked = scores.flatten(1).sort(-1, descending=True).values
    return ranked[:, torch.arange(1, scores.shape[2], device=ranked.device) * scores.shape[1]]


@torch.no_grad()
def fit_thresholds(method: FocusDual, counts: str, observations: list[Observation]) -> Tensor:
    """Return the thresholds of a fitted `method` under the counting rule `counts`."""
    scores = []
    for observation in observations:
        tokens = standardized_tokens(observation, method)[None]
        position = torch.arange(tokens.shape[1], device=tokens.device)[None]
        scores.append(method.normalize_lengths(counts, method.group_scores(tokens), position)[0])
    return score_thresholds(torch.cat(scores, 1))


@torch.no_grad()
def balance_keys(method: FocusDual, logits: Tensor) -> None:
    """Balance the groups of keys with log-probabilities `(n, N, K)`, by the bias of their encoder.

    Soft groups: the largest hard one still has about five times the mean. Evener ones keep less importance.
    """
    logits = logits[:, :: math.ceil(logits.shape[1] / BALANCED_TOKENS)]
    method.key_encoder.bias.add_(balancing_bias(logits, 30, SHARPNESS))


def draw_index(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def minimize(loss: Callable[[int], Tensor], parameters: list[nn.Parameter], learning_rate: float, steps: int) -> None:
    """Take `steps` steps of Adam on loss(step), with a learning rate that falls linearly to 0."""
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))
    with torch.enable_grad():
        for step in range(steps):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            schedule.step()
