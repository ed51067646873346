"""Flash kernels for tokens in one group each: all groups in one varlen call; the window by Triton."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention as torch_attention
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels.contract import KernelRequirements
from focus_exp.attention.kernels.fused import Triton, capability_reason, import_error, window_forward
from focus_exp.attention.kernels.layout import Plan
from focus_exp.attention.selection import AttentionArgs


class FlashGroups(Triton):
    """Compute groups as causal segments of gathered tokens by a flash kernel; the backward is Triton's."""

    has_softcap = False

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        if reason := super().unsupported_reason(requirements):
            return reason
        if requirements.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {str(requirements.dtype).removeprefix('torch.')}"
        if requirements.softcap and not self.has_softcap:
            return "has no softcap"
        return None if requirements.one_group else "needs every token in one group, and these may be in several"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, plan: Plan, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        order, segments = plan.lists.queries[0].long(), plan.lists.segments[0][0] // plan.length
        bounds = torch.arange(plan.batch * (plan.groups + 1) + 1, device=q.device)
        offsets = torch.searchsorted(segments, bounds, out_int32=True)
        o, o_lse = self.segments(pad_head(q[order]), pad_head(k[order]), pad_head(v[order]), offsets, args)
        grouped = segments % (plan.groups + 1) < plan.groups
        place = torch.where(grouped, torch.arange(len(order), device=q.device), -1).int()
        place = torch.empty_like(place).scatter_(0, order, place)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], len(q), device=q.device)
        o = o[..., : q.shape[-1]].contiguous()
        window_forward(q, k, v, out, lse, logits, plan, args, (o, o_lse.contiguous(), place))
        return out, lse

    @abstractmethod
    def segments(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Return output `(n, H, D)` and natural logsumexp `(H, n)` of causal segments `offsets` `(m + 1,)` int32.

        The longest segment is bounded by all tokens, since reading it would wait for the device.
        """


@dataclass(frozen=True)
class TorchFlash(FlashGroups):
    """Call torch's operation: its FlashAttention 2, or the one that `activate_flash_attention_impl` registers."""

    name: str
    impl: str | None = None  # FA3 or FA4

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        if (reason := super().unsupported_reason(requirements)) or self.impl is None:
            return reason
        if self.impl not in getattr(torch_attention, "list_flash_attention_impls", list)():
            return f"needs a torch that can activate {self.impl}"
        missing = import_error(PACKAGES[self.impl])
        return capability_reason((9, 0)) or (missing and f"needs {self.impl}: {missing}")

    def segments(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        activate(self.impl)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, len(q), len(q), 0.0, False, False,
            scale=args.scaling, window_size_left=-1, window_size_right=0,
        )  # fmt: skip
        return out, lse


class FlashAttn(FlashGroups):
    """Call the package flash-attn (2.7 and later), which has softcap.

    Its wheels are for torch 2.6 to 2.10; the Triton kernels support all that it does.
    """

    name = "flash-attn"
    has_softcap = True

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        if reason := super().unsupported_reason(requirements):
            return reason
        missing = import_error("flash_attn.flash_attn_interface")
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
    """Set what torch's flash operation runs in this process."""
    current = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    if impl is not None and current != impl:
        torch_attention.activate_flash_attention_impl(impl)
    elif impl is None and current is not None:
        torch_attention.restore_flash_attention_impl()


def pad_head(x: Tensor) -> Tensor:
    """Pad the head size of `(n, H, D)` with zeros to a multiple of eight, for flash kernels."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def flash_attn() -> Any:
    """Return the package's interface; None where it cannot be imported."""
    name = "flash_attn.flash_attn_interface"
    return None if import_error(name) else importlib.import_module(name)
