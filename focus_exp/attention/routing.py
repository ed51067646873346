"""Routing: project hidden states, compare them with the centroids, assign every token to groups (paper section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CAST_ELEMENTS = 2**22


class RouterOutput(NamedTuple):
    """Projected tokens `(B, T, R)`, scores `(B, T, K)` and the balance potential `(K,)`, the router's own buffer."""

    tokens: Tensor
    scores: Tensor
    potential: Tensor


class Router(nn.Module):
    """Routing scores of one layer, S = (h W_g) C^T.

    Call the module: forward hooks (accelerate's offload, FSDP2) provide its parameters and buffers within `forward`.

    Holds E*R + K*R trainable numbers and one buffer, the balance potential `[K]`, which is averaged, not trained.
    With `normalize` the projected tokens and the centroids are compared by cosine, so that one temperature suits
    models whose hidden states differ in scale by orders of magnitude. Without `trained_centroids` those are a buffer.
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
        """Tokens `[B, T, R]` in routing space, of length 1 with `normalize`."""
        with own_precision(h):
            parts = [part @ self.projection for part in cast(h, self.projection.dtype)]
            tokens = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            return F.normalize(tokens, dim=-1) if self.normalize else tokens

    def compare(self, tokens: Tensor) -> Tensor:
        """Scores `[B, T, K]` of projected tokens `[B, T, R]`."""
        with own_precision(tokens):
            return tokens @ (F.normalize(self.centroids, dim=-1) if self.normalize else self.centroids).T


def cast(h: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """`[B, T, E]` some tokens at a time: a whole copy in the router's precision would be the layer's largest tensor."""
    size = max(1, CAST_ELEMENTS // h.shape[-1])
    for part in (h,) if h.shape[1] <= size else h.split(size, 1):
        yield part.to(dtype)


def own_precision(x: Tensor) -> AbstractContextManager[object]:
    """Without autocast, which takes longer to be told so than a token to be routed."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def sinkhorn(logits: Tensor, iterations: int, valid: Tensor | None = None) -> Tensor:
    """Sinkhorn assignment (paper section 2): rows `[B, T, K]` end as distributions, columns carry equal mass.

    Not causal: the column sums run over the whole sequence. `valid` `[B, T]` leaves padding out of them.
    """
    if valid is not None:  # where all of a text is padding there would be nothing to sum
        valid = valid | ~valid.any(-1, keepdim=True)
    for _ in range(iterations):
        counted = logits if valid is None else logits.masked_fill(~valid[..., None], float("-inf"))
        logits = logits - counted.logsumexp(-2, keepdim=True)
        logits = logits.log_softmax(-1)
    return logits.exp()


def balance_potential(
    logits: Tensor, start: Tensor, iterations: int, valid: Tensor | None = None, sharpness: float = 1.0
) -> Tensor:
    """The column potential b `[K]` for which softmax(logits + b) gives every group the same mass over these tokens.

    It is what Sinkhorn's column step converges to, so g = softmax(logits + b) depends on token i alone once b is
    frozen (paper.md section 4 of the causal variant). `sharpness` > 1 balances the sharpened assignment, which tends
    to the counts of the hard one.
    """
    rows = logits.reshape(-1, logits.shape[-1]) if valid is None else logits[valid]
    potential = start
    for _ in range(iterations if len(rows) else 0):
        mass = ((rows + potential) * sharpness).log_softmax(-1).logsumexp(0) - torch.log(torch.tensor(float(len(rows))))
        # the step is damped by the sharpness: a potential moves sharpened masses that much faster
        potential = potential - (mass + torch.log(torch.tensor(float(rows.shape[-1])))) / sharpness
    return potential - potential.mean()
