"""Which kernels compute full attention, and what a mask does to grouped heads."""

import pytest
import torch
import torch.nn.functional as F

from focus_exp.attention.dense import masked_attention
from focus_exp.attention.selection import AttentionArgs
from focus_exp.speed import workload
from focus_exp.speed.workload import Shape, Tensors, full_attention, run_full_step

CPU = torch.device("cpu")
SHAPE = Shape(width=8, heads=2, kv_heads=1, head_dim=8)


def refused() -> None:
    raise RuntimeError("No available kernel")


def test_full_attention_without_fused_kernel_uses_math(monkeypatch):
    """As float32 on a GPU did: nothing that might be fastest served, and the choice among none failed."""
    tensors = Tensors.random(SHAPE, 8, torch.float32, CPU)
    works = {"sdpa-flash": refused, "sdpa-cudnn": refused, workload.SLOWEST: lambda: tensors.q}
    monkeypatch.setattr(workload, "full_attention_kernels", lambda _: works)
    assert full_attention(tensors, CPU)[0] == workload.SLOWEST
    works |= {"sdpa-efficient": lambda: tensors.k}
    assert full_attention(tensors, CPU)[0] == "sdpa-efficient"
    works |= {"sdpa-efficient": refused, workload.SLOWEST: refused}
    with pytest.raises(RuntimeError, match="no full attention for torch.float32 on cpu"):
        full_attention(tensors, CPU)


def test_full_attention_training_needs_backward(monkeypatch):
    tensors = Tensors.random(SHAPE, 8, torch.float32, CPU).with_grad()

    def exact() -> torch.Tensor:
        return F.scaled_dot_product_attention(tensors.q, tensors.k, tensors.v, is_causal=True, enable_gqa=True)

    works = {"forward alone": lambda: exact().detach(), "both": exact, workload.SLOWEST: refused}
    monkeypatch.setattr(workload, "full_attention_kernels", lambda _: works)
    name, work = full_attention(tensors, CPU)
    assert name == "both"
    run_full_step(work, tensors)


def test_masked_attention_cuda_gqa_repeats_keys(monkeypatch):
    class OnCuda(torch.Tensor):
        is_cuda = True

    q, (k, v) = torch.randn(1, 4, 6, 8), torch.randn(2, 1, 2, 6, 8)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    expected = masked_attention(q, k, v, keep, AttentionArgs(0.3))
    kernel, asked = F.scaled_dot_product_attention, []

    def watched(q, k, v, **options):
        asked.append((k.shape[1], options["enable_gqa"]))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found = masked_attention(q.as_subclass(OnCuda), k, v, keep, AttentionArgs(0.3))
    assert asked == [(4, False)]
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
