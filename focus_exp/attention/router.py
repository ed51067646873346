"""Routing: project hidden states, compare them with centroids, balance the groups (paper section 2).

Also what the paper tried against router collapse (table 8): two auxiliary losses, and centroids that follow tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from focus_exp.attention.kernels import gpu_sparse

CAST_ELEMENTS = 2**22
KMEANS_ITERATIONS = 10


class RouterOutput(NamedTuple):
    """Projected tokens `(B, T, R)`, scores `(B, T, K)` and the balance potential `(K,)`, the router's own buffer."""

    tokens: Tensor
    scores: Tensor
    potential: Tensor


class Router(nn.Module):
    """Compute routing scores S = (h W_g) C^T of one layer.

    Call the module: forward hooks (FSDP2) provide its parameters and buffers within `forward`.
    It has E*R + K*R trainable parameters and one buffer, the balance potential `(K,)`, which is averaged, not trained.

    Args:
        width: E, model width.
        groups: K.
        routing_dim: R.
        normalize: compare tokens and centroids by cosine, so that one temperature suits models whose hidden states
            differ in scale by orders of magnitude.
        trained_centroids: False makes the centroids a buffer.
    """

    def __init__(
        self, width: int, groups: int, routing_dim: int, normalize: bool, trained_centroids: bool = True
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.projection = nn.Parameter(torch.empty(width, routing_dim))
        self.centroids: Tensor
        if trained_centroids:
            self.centroids = nn.Parameter(torch.empty(groups, routing_dim))
        else:
            self.register_buffer("centroids", torch.empty(groups, routing_dim))
        self.potential: Tensor
        self.register_buffer("potential", torch.zeros(groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.projection, std=self.projection.shape[0] ** -0.5)
        nn.init.normal_(self.centroids, std=self.centroids.shape[1] ** -0.5)
        nn.init.zeros_(self.potential)

    def forward(self, h: Tensor) -> RouterOutput:
        """Route hidden states `(B, T, E)` in the router's precision, whatever the model's."""
        tokens = self.project(h)
        return RouterOutput(tokens, self.compare(tokens), self.potential)

    def project(self, h: Tensor) -> Tensor:
        """Project `(B, T, E)` into routing space `(B, T, R)`, to length 1 with `normalize`."""
        with disable_autocast(h):
            tokens = multiply_tokens(h, self.projection)
            return F.normalize(tokens, dim=-1) if self.normalize else tokens

    def compare(self, tokens: Tensor) -> Tensor:
        """Score projected tokens `(B, T, R)` against the centroids: `(B, T, K)`."""
        with disable_autocast(tokens):
            return tokens @ (F.normalize(self.centroids, dim=-1) if self.normalize else self.centroids).T


def multiply_tokens(h: Tensor, weight: Tensor) -> Tensor:
    """Multiply tokens `(B, T, E)` by `(E, R)` with the accuracy of the weight's precision."""
    if weight.dtype == torch.float32 and gpu_sparse.can_multiply_halves(h):
        return gpu_sparse.project(h, weight)
    chunks = [chunk @ weight for chunk in cast_chunks(h, weight.dtype)]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)


def cast_chunks(h: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Cast `(B, T, E)` some tokens at a time: a full copy in float32 would be the layer's largest tensor."""
    size = max(1, CAST_ELEMENTS // h.shape[-1])
    for chunk in (h,) if h.shape[1] <= size else h.split(size, 1):
        yield chunk.to(dtype)


def disable_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disable autocast where it is enabled; entering the context costs more than routing a token."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def sinkhorn(logits: Tensor, iterations: int, valid: Tensor | None = None) -> Tensor:
    """Compute the Sinkhorn assignment (paper section 2): rows are distributions, columns carry equal mass.

    Not causal: column sums run over the whole sequence.

    Args:
        logits: `(B, T, K)`.
        valid: `(B, T)` bool, False on padding, which column sums leave out.
    """
    if valid is not None:  # a row of padding alone would have nothing to sum
        valid = valid | ~valid.any(-1, keepdim=True)
    for _ in range(iterations):
        unpadded = logits if valid is None else logits.masked_fill(~valid[..., None], float("-inf"))
        logits = (logits - unpadded.logsumexp(-2, keepdim=True)).log_softmax(-1)
    return logits.exp()


def balance_potential(
    logits: Tensor, start: Tensor, iterations: int, valid: Tensor | None = None, sharpness: float = 1.0
) -> Tensor:
    """Find the potential b `(K,)` for which softmax(logits + b) gives every group equal mass over these tokens.

    Sinkhorn's column step converges to it, so softmax(logits + b) depends on the token alone once b is frozen: the
    causal form of the assignment.

    Args:
        logits: `(B, T, K)`.
        start: `(K,)`, initial potential.
        sharpness: above 1 balances the sharpened assignment, which tends to the counts of hard routing.
    """
    rows = logits.reshape(-1, logits.shape[-1]) if valid is None else logits[valid]
    return equalize(rows, start, iterations if len(rows) else 0, sharpness)


def equalize(logits: Tensor, start: Tensor, iterations: int, sharpness: float = 1.0) -> Tensor:
    """Find `balance_potential` `(..., K)` of tokens `(..., N, K)`, from `start` `(..., K)`."""
    log_tokens, log_groups = torch.tensor([float(size) for size in logits.shape[-2:]]).log()
    potential = start
    for _ in range(iterations):
        mass = ((logits + potential.unsqueeze(-2)) * sharpness).log_softmax(-1).logsumexp(-2) - log_tokens
        # damped by the sharpness: a potential moves sharpened masses that much faster
        potential = potential - (mass + log_groups) / sharpness
    return potential - potential.mean(-1, keepdim=True)


def balance_loss(assignment: Tensor) -> Tensor:
    """Return the KL divergence [nats] of the mean assignment of tokens `(N, K)` from uniform, 0 to log K.

    With `entropy_loss` the pair of entropies of Mustafa et al. 2022 (arXiv 2206.02770). Around balance it is half of
    the Switch Transformer's K * sum_k f_k P_k (Fedus et al. 2022), whose weights apply.
    """
    return math.log(assignment.shape[-1]) - entropy(assignment.mean(0))


def entropy_loss(assignment: Tensor) -> Tensor:
    """Return the mean entropy [nats] of the assignments of tokens `(N, K)`: 0 where each is sure of its group."""
    return entropy(assignment).mean()


def entropy(p: Tensor) -> Tensor:
    """Return the entropy [nats] of distributions `(..., K)`, with a finite gradient at 0."""
    return -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)


def follow_means(centroids: Tensor, tokens: Tensor, groups: Tensor, decay: float) -> Tensor:
    """Move centroids `(K, R)` towards the means of the tokens `(N, R)` of their `groups` `(N,)`."""
    return move_to_means(centroids, sum_groups(tokens, groups, len(centroids)), decay)


def sum_groups(tokens: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sum the tokens `(N, R)` of each group; returns `(K, R + 1)`, the sums and in the last column the sizes."""
    members = F.one_hot(groups, count).to(tokens.dtype)
    return members.T @ F.pad(tokens, (0, 1), value=1.0)


def move_to_means(centroids: Tensor, sums: Tensor, decay: float) -> Tensor:
    """Move centroids `(K, R)` to decay * c + (1 - decay) * mean; those of empty groups stay.

    Args:
        sums: `(K, R + 1)`, of `sum_groups`.
    """
    totals, sizes = sums[:, :-1], sums[:, -1:]
    return torch.where(sizes > 0, torch.lerp(totals / sizes.clamp(min=1), centroids, decay), centroids)


def kmeans(tokens: Tensor, groups: int, seed: int) -> Tensor:
    """Fit centroids `(K, R)` to tokens `(N, R)`: Lloyd's steps from k-means++ (Arthur, Vassilvitskii 2007)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = int(torch.randint(len(tokens), (1,), generator=generator))
    centroids = tokens[chosen : chosen + 1]
    while len(centroids) < groups:
        distance = torch.cdist(tokens, centroids).amin(-1).square().cpu()
        weights = distance if distance.sum() > 0 else torch.ones_like(distance)
        chosen = int(torch.multinomial(weights, 1, generator=generator))
        centroids = torch.cat([centroids, tokens[chosen : chosen + 1]])
    for _ in range(KMEANS_ITERATIONS):
        centroids = follow_means(centroids, tokens, torch.cdist(tokens, centroids).argmin(-1), decay=0.0)
    return centroids
