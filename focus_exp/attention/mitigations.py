"""What the paper tried against one group swallowing all tokens (table 8): two losses, and centroids that follow tokens.

The losses are those of mixtures of experts that are trained on two entropies (Mustafa et al. 2022, arXiv 2206.02770):
every token should be sure of its group, all tokens together should spread over the groups.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

KMEANS_ITERATIONS = 10


def balance_loss(assignment: Tensor) -> Tensor:
    """KL divergence [nats] of the mean assignment of tokens `[N, K]` from the uniform one: 0 at balance, at most log K.

    Around balance it is half of the Switch Transformer's K * sum_k f_k P_k (Fedus et al. 2022), whose weights apply.
    That one counts f, and has its minimum at balance only where counts follow probabilities.
    """
    return math.log(assignment.shape[-1]) - entropy(assignment.mean(0))


def entropy_loss(assignment: Tensor) -> Tensor:
    """Mean entropy [nats] of the assignments of tokens `[N, K]`: 0 where every token is sure of its group."""
    return entropy(assignment).mean()


def entropy(p: Tensor) -> Tensor:
    """Of distributions `[..., K]`, in nats; its gradient is finite at 0, too."""
    return -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)


def follow_means(centroids: Tensor, tokens: Tensor, groups: Tensor, decay: float) -> Tensor:
    """Centroids `[K, R]` moved towards the means of the projected tokens `[N, R]` whose `groups` `[N]` they are.

    c <- decay * c + (1 - decay) * mean; a centroid without tokens stays.
    """
    return move_to_means(centroids, *group_means(tokens, groups, len(centroids)), decay)


def group_means(tokens: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Average the tokens `(N, R)` of each group; returns means `(K, R)` and the groups' sizes `(K, 1)`."""
    members = F.one_hot(groups, count).to(tokens.dtype)
    sizes = members.sum(0)[:, None]
    return members.T @ tokens / sizes.clamp(min=1), sizes


def move_to_means(centroids: Tensor, means: Tensor, sizes: Tensor, decay: float) -> Tensor:
    """Move centroids `(K, R)` towards the means of their groups; those of empty groups stay."""
    return torch.where(sizes > 0, torch.lerp(means, centroids, decay), centroids)


def kmeans(tokens: Tensor, groups: int, seed: int) -> Tensor:
    """Centroids `[K, R]` of projected tokens `[N, R]`: Lloyd's steps from k-means++ (Arthur, Vassilvitskii 2007)."""
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
