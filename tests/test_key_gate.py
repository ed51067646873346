"""The gate on keys equals its definition by every path; test_baseline_fits.py has its fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_sequence

from focus_exp.attention.base import LayerShape
from focus_exp.attention.dense import reference_attention
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.attention.key_gate import KeyGate
from focus_exp.attention.selection import AttentionArgs, base_mask, local_mask

WIDTH, T = 12, 96
NEAR = {"window": 5, "sinks": 2}


def make_gate(heads: int = 4, kv_heads: int = 2) -> KeyGate:
    method = KeyGate.create(LayerShape(WIDTH, heads, 8, 0, kv_heads), **NEAR)
    method.mean.normal_()
    method.scale.uniform_(0.5, 2)
    return method


@pytest.mark.parametrize("backend", ["masked", "cpu"])
@given(seed=st.integers(0, 1000), where=st.sampled_from(["plain", "left", "right"]))
@settings(max_examples=10)
@torch.no_grad()
def test_key_gate_keeps_its_definition(backend, seed, where):
    if backend == "cpu" and unavailable_reason() is not None:
        pytest.skip("no compiler")
    torch.manual_seed(seed)
    method, h, sequence = make_gate(), torch.randn(2, 40, WIDTH), random_sequence(where, 2, 40)
    method.backend = backend
    q, k, v = torch.randn(2, 4, 40, 8), *torch.randn(2, 2, 2, 40, 8)
    out = method.attend(q, k, v, method.route(h, sequence), sequence, AttentionArgs(0.3))
    score = (h - method.mean) / method.scale @ method.weight.T + method.bias  # (B, T, n)
    every = slice(0, 40)
    seen = base_mask(sequence, every, 40) | torch.eye(40, dtype=torch.bool)
    local = local_mask(sequence, every, 40, method.window, method.sinks)
    keep = seen[:, None] & (local[:, None] | (score > 0).transpose(1, 2)[:, :, None])
    s = (q.unflatten(1, (2, 2)) @ k[:, :, None].transpose(-1, -2) * 0.3).masked_fill(~keep[:, :, None], -torch.inf)
    expected = (s.softmax(-1) @ v[:, :, None]).flatten(1, 2)
    real = torch.ones(2, 40, dtype=torch.bool) if sequence.valid is None else sequence.valid
    torch.testing.assert_close(out.transpose(1, 2)[real], expected.transpose(1, 2)[real], atol=1e-5, rtol=1e-5)
    reference = reference_attention(q, k, v, method.route(h, sequence), sequence, AttentionArgs(0.3, **NEAR))
    torch.testing.assert_close(reference.transpose(1, 2)[real].float(), expected.transpose(1, 2)[real])
