"""Flash kernels for the groups, where a token is in one: all segments in one call; the window by Triton."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention as attention_of_torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels.contract import Demand
from focus_exp.attention.kernels.fused import Triton, found, too_old, window_forward
from focus_exp.attention.kernels.layout import Plan
from focus_exp.attention.selection import AttentionArgs


class FlashGroups(Triton):
    """Groups as causal segments of gathered tokens by a flash kernel; the backward is Triton's, routers included."""

    softcap = False

    def refuses(self, demand: Demand) -> str | None:
        if reason := super().refuses(demand):
            return reason
        if demand.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {str(demand.dtype).removeprefix('torch.')}"
        if demand.softcap and not self.softcap:
            return "has no softcap"
        return None if demand.one_group else "serves tokens of one group each, and these may be in several"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, plan: Plan, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        order, segments = plan.lists.queries[0].long(), plan.lists.segments[0][0] // plan.length
        bounds = torch.arange(plan.batch * (plan.groups + 1) + 1, device=q.device)
        offsets = torch.searchsorted(segments, bounds, out_int32=True)
        ours, ours_lse = self.segments(packed(q[order]), packed(k[order]), packed(v[order]), offsets, args)
        grouped = segments % (plan.groups + 1) < plan.groups
        place = torch.where(grouped, torch.arange(len(order), device=q.device), -1).int()
        place = torch.empty_like(place).scatter_(0, order, place)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], len(q), device=q.device)
        ours = ours[..., : q.shape[-1]].contiguous()
        window_forward(q, k, v, out, lse, logits, plan, args, (ours, ours_lse.contiguous(), place))
        return out, lse

    @abstractmethod
    def segments(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Output `[n, H, D]` and natural logsumexp `[H, n]` of causal segments `offsets` `[m + 1]` int32.

        The longest is not known without a wait for the device; all tokens are an upper bound.
        """


@dataclass(frozen=True)
class TorchFlash(FlashGroups):
    """torch's own operation, by its FlashAttention 2 or by what `activate_flash_attention_impl` puts in its place."""

    name: str
    impl: str | None = None  # FA3 or FA4

    def refuses(self, demand: Demand) -> str | None:
        if (reason := super().refuses(demand)) or self.impl is None:
            return reason
        if self.impl not in getattr(attention_of_torch, "list_flash_attention_impls", list)():
            return f"needs a torch that can activate {self.impl}"
        missing = found(PACKAGES[self.impl])
        return too_old((9, 0)) or (missing and f"needs {self.impl}: {missing}")

    def segments(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        activate(self.impl)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, len(q), len(q), 0.0, False, False,
            scale=args.scaling, window_size_left=-1, window_size_right=0,
        )  # fmt: skip
        return out, lse


class FlashAttn(FlashGroups):
    """The package flash-attn (2.7 and later), which knows softcap.

    Its wheels are for torch 2.6 to 2.10, others build it from source; without it the Triton kernels serve all it does.
    """

    name = "flash-attn"
    softcap = True

    def refuses(self, demand: Demand) -> str | None:
        if reason := super().refuses(demand):
            return reason
        missing = found("flash_attn.flash_attn_interface")
        return missing and (
            f"needs the package flash-attn, whose wheels are for torch 2.6 to 2.10 (this is {torch.__version__}; "
            f"backend=triton does the same): {missing}"
        )

    def segments(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = flash_attn()._flash_attn_varlen_forward(
            q, k, v, offsets, offsets, len(q), len(q), 0.0, args.scaling, True,
            window_size_left=-1, window_size_right=0, softcap=args.softcap or 0.0,
        )  # fmt: skip
        return out, lse


PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}


def activate(impl: str | None) -> None:
    """What torch's flash operation runs from now on in this process."""
    current = getattr(attention_of_torch, "current_flash_attention_impl", lambda: None)()
    if impl is not None and current != impl:
        attention_of_torch.activate_flash_attention_impl(impl)
    elif impl is None and current is not None:
        attention_of_torch.restore_flash_attention_impl()


def packed(x: Tensor) -> Tensor:
    """`[n, H, D]`, the head size filled up with zeros to a multiple of eight for flash kernels."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def flash_attn() -> Any:
    """The package's interface, None where it cannot be imported."""
    name = "flash_attn.flash_attn_interface"
    return None if found(name) else importlib.import_module(name)
