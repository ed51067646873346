"""Random attention problems: assignments of every shape, sequences with padding and packing."""

import torch
from torch import Tensor

from focus_exp.attention.selection import Sequence


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
