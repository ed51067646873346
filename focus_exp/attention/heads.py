"""Groups of their own for every key/value head: the heads become rows of the batch, and all code stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from torch import Tensor

from focus_exp.attention.selection import Selection, Sequence, by_head


def for_each_head(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`attention(q, k, v, selection, sequence, ...)`, which knows one grouping a row, for one a key/value head too."""

    @wraps(attention)
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        sequence: Sequence,
        *args: object,
        sink_logits: Tensor | None = None,
        **options: object,
    ) -> Tensor:
        selection, sequence, heads = by_head(selection, sequence)
        if heads == 1:
            return attention(q, k, v, selection, sequence, *args, sink_logits=sink_logits, **options)
        rows = [x.unflatten(1, (heads, -1)).flatten(0, 1) for x in (q, k, v)]
        if sink_logits is not None:
            sink_logits = sink_logits.view(heads, -1).repeat(len(q), 1)
        out = attention(*rows, selection, sequence, *args, sink_logits=sink_logits, **options)
        return out.unflatten(0, (-1, heads)).flatten(1, 2)

    return attend
