"""Attention to the keys of a KV cache in place: one operator, by C++ on a CPU and by Triton on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from focus_exp.attention.kernels import cpu_sparse, gpu_sparse
from focus_exp.attention.kernels.contract import MAX_HEAD_DIM

LIBRARY = torch.library.Library("focus_exp", "FRAGMENT")
LIBRARY.define(
    "attend_cached(Tensor q, Tensor k, Tensor v, Tensor key_groups, Tensor query_groups, Tensor? visible, "
    "Tensor? before, Tensor? sink_logits, int window, int sinks, float scaling, float softcap) -> Tensor"
)
# (B, T, H, D) of q (B, H, T, D); see CachedKeys
attend_cached = torch.ops.focus_exp.attend_cached.default
KERNELS: dict[str, Any] = {"cpu": cpu_sparse, "cuda": gpu_sparse}
HALF, FULL = torch.bfloat16, torch.float32
# of q, k and v; under autocast rotary layers leave keys in float32
DTYPES = {"cpu": {(HALF, HALF, HALF), (FULL, FULL, FULL), (HALF, FULL, HALF)}}
DTYPES["cuda"] = DTYPES["cpu"] | {(torch.float16, torch.float16, torch.float16)}


@torch.library.register_fake("focus_exp::attend_cached")
def attend_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@torch.library.impl("focus_exp::attend_cached", "CUDA")
def attend_cuda(*args: Any) -> Tensor:
    module = importlib.import_module("focus_exp.attention.kernels.decode_gpu")  # which needs Triton
    out: Tensor = module.attend_cached(*args)
    return out


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether the operator takes q `(B, H, T, D)` and k, v `(B, G, S, D)`; it has no gradient."""
    device = q.device.type
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return False
    if device not in KERNELS or (q.dtype, k.dtype, v.dtype) not in DTYPES[device]:
        return False
    sizes = max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM and all(x.stride(-1) == 1 for x in (q, k, v))
    return sizes and KERNELS[device].unavailable_reason() is None
