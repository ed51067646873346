"""Control without a query side: a gate decides once whether all later queries see a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.options import Fraction, LocalOptions
from focus_exp.attention.router import disable_autocast, multiply_tokens
from focus_exp.attention.selection import Selection, Sequence


@dataclass
class KeyGateOptions(LocalOptions):
    """Options of `key_gate`; a fit turns `density` into the threshold."""

    density: Fraction = 0.2


class KeyGate(AttentionMethod, name="key_gate", options=KeyGateOptions):
    """Keep i - j <= window, the first `sinks` tokens, and the distant keys whose score passes the threshold.

    A key's score for each key/value head is linear in the standardized hidden state: the log importance per later query
    that the fit predicts. One threshold over all layers and heads keeps `density` of the distant pairs. It depends on
    the token alone, so the method is causal. The gate has n * (E + 1) parameters per layer, for n key/value heads.
    """

    is_fitted = True

    def __init__(self, shape: LayerShape, options: KeyGateOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        heads = shape.kv_heads or shape.heads
        self.weight = nn.Parameter(torch.randn(heads, shape.width) * shape.width**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads))
        self.mean: Tensor
        self.scale: Tensor
        self.threshold: Tensor
        self.register_buffer("mean", torch.zeros(shape.width))
        self.register_buffer("scale", torch.ones(shape.width))
        self.register_buffer("threshold", torch.zeros(()))

    def scores(self, x: Tensor) -> Tensor:
        """Score standardized hidden states `(..., E)` as keys: `(..., n)`."""
        return x @ self.weight.T + self.bias

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        with disable_autocast(h):
            weight = self.weight / self.scale
            limit = self.threshold - self.bias + weight @ self.mean
            keys = (multiply_tokens(h, weight.T) > limit).transpose(1, 2)[..., None]  # (B, n, T, 1)
        return Selection(query_groups=torch.ones_like(keys), key_groups=keys, max_groups=(1, 1))

    def kv_cache_unsupported_reason(self) -> None:
        return None
