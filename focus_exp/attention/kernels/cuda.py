"""Flash kernels for CUDA: torch's own and the package flash-attn, all segments in one variable-length call."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels.contract import Demand, Gradients, Kernel, Meeting, Whole


class TorchFlash(Kernel):
    """torch's own flash kernel for CUDA, all segments in one variable-length call."""

    name = "torch-flash"
    takes = "segments"

    def refuses(self, demand: Demand) -> str | None:
        return refused_by_flash(demand) or ("has no softcap" if demand.softcap else None)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        offsets, longest = variable_lengths(meeting, q.shape[1])
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            packed(q), packed(k), packed(v), offsets, offsets, longest, longest, 0.0, False, False,
            scale=scaling, window_size_left=left(meeting), window_size_right=0,
        )  # fmt: skip
        return out[None, ..., : q.shape[-1]], lse.transpose(0, 1)[None]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Gradients:
        offsets, longest = variable_lengths(meeting, q.shape[1])
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            packed(whole.grad), packed(q), packed(k), packed(v), packed(whole.out),
            whole.lse[0].transpose(0, 1).contiguous(), offsets, offsets, longest, longest, 0.0, False, unused, unused,
            scale=scaling, window_size_left=left(meeting), window_size_right=0,
        )  # fmt: skip
        return dq[None, ..., : q.shape[-1]], dk[None, ..., : q.shape[-1]], dv[None, ..., : q.shape[-1]]


class FlashAttn(Kernel):
    """The package flash-attn (2.7 and later), which knows softcap."""

    name = "flash-attn"
    takes = "segments"

    def refuses(self, demand: Demand) -> str | None:
        return refused_by_flash(demand) or (
            "needs the package flash-attn, which is not installed" if flash_attn() is None else None
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        offsets, longest = variable_lengths(meeting, q.shape[1])
        out, lse, *_ = flash_attn()._flash_attn_varlen_forward(
            packed(q), packed(k), packed(v), offsets, offsets, longest, longest, 0.0, scaling, True,
            window_size_left=left(meeting), window_size_right=0, softcap=softcap or 0.0,
        )  # fmt: skip
        return out[None, ..., : q.shape[-1]], lse.transpose(0, 1)[None]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Gradients:
        offsets, longest = variable_lengths(meeting, q.shape[1])
        q_, k_, v_ = packed(q), packed(k), packed(v)
        dq, dk, dv = torch.empty_like(q_), torch.empty_like(k_), torch.empty_like(v_)
        flash_attn()._flash_attn_varlen_backward(
            packed(whole.grad), q_, k_, v_, packed(whole.out), whole.lse[0].transpose(0, 1).contiguous(), dq, dk, dv,
            offsets, offsets, longest, longest, 0.0, scaling, True, left(meeting), 0, softcap or 0.0, None, False,
        )  # fmt: skip
        return dq[None, ..., : q.shape[-1]], dk[None, ..., : q.shape[-1]], dv[None, ..., : q.shape[-1]]


def variable_lengths(meeting: Meeting, tokens: int) -> tuple[Tensor, int]:
    """Offsets `[segments + 1]` int32 and an upper bound of the lengths, which spares a wait for the device."""
    assert meeting.lengths is not None
    return F.pad(meeting.lengths.cumsum(0), (1, 0)).to(torch.int32), tokens


def left(meeting: Meeting) -> int:
    return -1 if meeting.window is None else meeting.window


def packed(x: Tensor) -> Tensor:
    """`[1, n, H, D]` -> `[n, H, D']`, the head size filled up with zeros to a multiple of eight for flash kernels."""
    missing = -x.shape[-1] % 8
    return (F.pad(x, (0, missing)) if missing else x.contiguous())[0]


def refused_by_flash(demand: Demand) -> str | None:
    if demand.device != "cuda":
        return f"runs on CUDA, the tensors are on {demand.device}"
    if demand.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {str(demand.dtype).removeprefix('torch.')}"
    return f"takes head sizes up to 256, not {demand.head_dim}" if demand.head_dim > 256 else None


def flash_attn() -> Any:
    try:
        return importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return None
