"""Random attention problems: assignments of every shape, sequences with padding and packing."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from focus_exp.attention.dense import reference_attention
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence


def random_assignment(kind: str, batch: int, length: int, groups: int) -> Tensor:
    logits = 3 * torch.randn(batch, length, groups, dtype=torch.float64)
    if kind == "giant":
        logits[..., 0] += 30
    if kind == "empty":
        logits[..., groups // 2 + 1 :] = -torch.inf
    return torch.full_like(logits, 1 / groups) if kind == "tied" else logits.softmax(-1)


def random_sequence(kind: str, batch: int, length: int) -> Sequence:
    index = torch.arange(length).expand(batch, length)
    cut = torch.randint(0, length, (batch, 1))
    if kind == "left":
        return Sequence(start=cut.expand(batch, length), valid=index >= cut)
    if kind == "right":
        return Sequence(start=torch.zeros_like(index), valid=index <= cut)
    if kind == "packed":
        start = torch.where(index >= cut, cut, 0)
        allowed = (index[:, :, None] >= index[:, None, :]) & (start[:, :, None] == start[:, None, :])
        return Sequence(start=start, allowed=allowed[:, None])
    if kind == "sliding":
        reach = int(torch.randint(1, length + 1, ()))
        allowed = (index[:, :, None] >= index[:, None, :]) & (index[:, :, None] - index[:, None, :] < reach)
        return Sequence(torch.zeros_like(index), allowed=allowed[:, None], reach=reach)
    return Sequence.plain(batch, length)


@dataclass
class Problem:
    """Hold q, k, v, what to select, and how to attend."""

    tensors: list[Tensor]
    selection: Selection
    sequence: Sequence
    args: AttentionArgs

    def run(self, attention: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the output on real tokens, and the gradients of q, k, v, sink logits and trained assignments."""
        wide = torch.promote_types(dtype, torch.float32)
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in self.tensors]
        args, selection = self.args, self.selection
        if args.sink_logits is not None:
            leaves.append(args.sink_logits.to(wide, copy=True).requires_grad_())
            args = replace(args, sink_logits=leaves[-1])
        for name in ("assignment", "key_assignment") if selection.is_soft or args.ste_slope is not None else ():
            if (x := getattr(selection, name)) is not None:
                leaves.append(x.to(wide, copy=True).requires_grad_())
                selection = replace(selection, **{name: leaves[-1]})
        out = attention(*leaves[:3], selection, self.sequence, args)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        if self.sequence.valid is not None:
            weights = weights * self.sequence.valid[:, None, :, None]
        gradients = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)
        with torch.no_grad():  # which takes other kernels
            untrained = attention(*(x.to(dtype) for x in self.tensors), self.selection, self.sequence, self.args)
        return [x.detach().double() for x in (*(y * (weights != 0) for y in (out, untrained)), *gradients)]

    def check(
        self, attention: Callable[..., Tensor], dtype: torch.dtype, tolerance: float, of_gradients: float | None = None
    ) -> None:
        """Compare with the reference; a gradient can be all cancellation, so that the largest sets the scale."""
        self.tensors = [x.to(dtype).double() for x in self.tensors]
        ours, exact = self.run(attention, dtype), self.run(reference_attention, torch.float64)
        scale = max(x.norm() for x in exact[2:])
        for index, (mine, truth) in enumerate(zip(ours, exact, strict=True)):
            limit = tolerance * truth.norm() if index < 2 else (of_gradients or tolerance) * max(truth.norm(), scale)
            assert (mine - truth).norm() <= limit
