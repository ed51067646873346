"""Hard-routed causal attention on a GPU by five launches of Triton kernels.

Count, scan and place sort tokens by group (`layout`); queries of a group attend to its keys (`groups`); the window
and the sinks are added and all is merged (`window`). The distant pairs that are computed are those that each query
selected, up to the ends of tiles. Routing by two encoders is a matrix product and one launch more.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from focus_exp.attention.kernels.contract import (
    Backend,
    BackendUnsupported,
    EncoderWeights,
    KernelRequirements,
    constant,
)
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_SHARED_GROUPS = 63  # bits of a word
PARTIAL_BYTES = 2**30  # room for partial results; longer sequences are computed in several spans of queries
CHUNK = 64  # tokens of a sequence that a program sorts
SPAN = 128  # tokens that a span is a multiple of
SCAN_BLOCK = 64  # chunks
SINK_CHUNK = 2048  # queries per program of the sinks' gradients
PROGRAMS = 8  # per multiprocessor, over all sequences and heads: several run at a time, and loads differ
Saved = tuple[Tensor, Tensor, Tensor]  # gradient of the output, logsumexp, and their delta


class Triton(Backend):
    """Support every selection of hard routing at head sizes up to 256, with gradients, the router's included."""

    name = "triton"
    device = "cuda"
    place = "CUDA"
    dtypes = DTYPES

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        return super().unsupported_reason(requirements) or unavailable_reason()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        if v.shape[-1] != q.shape[-1]:
            raise BackendUnsupported(
                f"backend={self.name} must have values of head size {q.shape[-1]} (got {v.shape[-1]}). "
                "Use backend=masked."
            )
        setup = KernelInputs.of(selection, sequence, args, k.shape[1])
        gates: list[Tensor | None] = [None, None]
        if args.ste_slope and selection.assignment is not None:
            pair = (selection.assignment, selection.effective_key_assignment)
            gates = [x if x.ndim == 4 else x[:, None] for x in pair]
        logits = None if args.sink_logits is None else args.sink_logits.float().expand(len(q), q.shape[1]).contiguous()
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        flat = [x if x.stride(-1) == 1 else x.contiguous() for x in flat]
        scores = (args.scaling, args.softcap or 0.0, args.ste_slope or 0.0)
        out: Tensor = gpu_attend(*flat, *setup.tensors, logits, *gates, *setup.numbers, *scores)[0]
        return out.unflatten(0, (len(q), -1)).transpose(1, 2)


@dataclass(frozen=True)
class KernelInputs:
    """Hold the memberships `(B, N, T, K)` uint8 of queries and keys, N = 1 or G, and what describes the sequences."""

    query_groups: Tensor
    key_groups: Tensor
    begins: Tensor  # (B,) int32, where the sequences begin
    valid: Tensor | None  # (B, T) uint8
    max_groups: tuple[int, int]
    window: int
    sinks: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.query_groups, self.key_groups, self.begins, self.valid

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        return *self.max_groups, self.window, self.sinks

    @staticmethod
    def unpack(tensors: Any, numbers: Any) -> KernelInputs:
        """Make one of what `tensors` and `numbers` return."""
        per_query, per_key, window, sinks = numbers
        query_groups, key_groups, begins, valid = tensors
        return KernelInputs(query_groups, key_groups, begins, valid, (per_query, per_key), window, sinks)

    @property
    def valid_or_placeholder(self) -> Tensor:
        return self.begins if self.valid is None else self.valid

    @staticmethod
    def of(selection: Selection, sequence: Sequence, args: AttentionArgs, kv_heads: int) -> KernelInputs:
        """Describe a selection.

        Raises:
            BackendUnsupported: tokens share several of more groups than there are bits, or heads do not fit.
        """
        assert selection.query_groups is not None and selection.key_groups is not None
        members = [x if x.ndim == 4 else x[:, None] for x in (selection.query_groups, selection.key_groups)]
        lists, groups = max(x.shape[1] for x in members), members[0].shape[-1]
        if lists not in (1, kv_heads):
            raise BackendUnsupported(
                f"backend=triton must have groups for each key/value head or for all (got {lists} for {kv_heads} heads)"
                ". Use backend=masked."
            )
        max_groups = selection.max_groups or (groups, groups)
        if groups > MAX_SHARED_GROUPS and min(max_groups) > 1:
            raise BackendUnsupported(
                f"attention.groups must be <= {MAX_SHARED_GROUPS} where keys are in several groups (got {groups}). "
                "Use backend=masked."
            )
        valid, start = sequence.valid, sequence.start
        begins = (start if valid is None else start.masked_fill(~valid, start.shape[1])).amin(1).int()
        queries, keys = (x.expand(-1, lists, -1, -1).contiguous().view(torch.uint8) for x in members)
        valid = None if valid is None else valid.to(torch.uint8).contiguous()
        return KernelInputs(queries, keys, begins, valid, max_groups, args.window, args.sinks)


@dataclass(frozen=True)
class Layout:
    """Hold the lists that `layout` describes, keys and values in the order of their list, and spans of queries."""

    setup: KernelInputs
    ahead: Tensor
    entries: Tensor
    visible: Tensor
    memberships: Tensor
    keys: Tensor
    slots: Tensor
    query_bits: Tensor
    key_bits: Tensor
    sorted_k: Tensor
    sorted_v: Tensor

    @staticmethod
    def empty(setup: KernelInputs, k: Tensor, v: Tensor) -> Layout:
        """Make room for the lists of keys and values `(n, G, D)`."""
        batch, lists, length, groups = setup.key_groups.shape
        (r, s), heads, size, device = setup.max_groups, k.shape[1], k.shape[2], k.device
        chunks, rows = -(-length // CHUNK), batch * lists

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        bits = [new(rows, length * n if min(r, s) > 1 else 1, dtype=torch.int64) for n in (1, s)]
        queries = {"entries": new(rows, length * r), "visible": new(rows, length * r), "query_bits": bits[0]}
        keys = {"keys": new(rows, length * s), "slots": new(rows, length, s), "key_bits": bits[1]}
        tokens = {"ahead": new(2, rows, chunks + 1, block_of(groups)), "memberships": new(rows, length)}
        sorted_k, sorted_v = (new(batch, heads, length * s, size, dtype=x.dtype) for x in (k, v))
        return Layout(setup, **tokens, **queries, **keys, sorted_k=sorted_k, sorted_v=sorted_v)

    @staticmethod
    def of(setup: KernelInputs, k: Tensor, v: Tensor) -> Layout:
        """Sort keys and values `(n, G, D)`."""
        layout, (batch, lists, length, groups) = Layout.empty(setup, k, v), setup.key_groups.shape
        heads, size, chunks, width = k.shape[1], k.shape[2], -(-length // CHUNK), layout.ahead.shape[-1]
        counts = torch.empty(2, batch * lists, chunks, width, dtype=torch.int32, device=k.device)
        common = {"K": groups, "BK": width, "C": CHUNK, "VALID": setup.valid is not None}
        described = (setup.query_groups, setup.key_groups, setup.begins, setup.valid_or_placeholder)
        kernels().count_members[(chunks, batch * lists)](
            *described, counts, length, chunks, setup.sinks, lists, **common
        )
        kernels().scan_counts[(2 * batch * lists,)](counts, layout.ahead, chunks, BK=width, BC=SCAN_BLOCK)
        kernels().place_tokens[(chunks, heads, batch)](
            k, v, layout.sorted_k, layout.sorted_v, *described, layout.ahead, layout.entries, layout.visible,
            layout.memberships, layout.keys, layout.slots, layout.query_bits, layout.key_bits,
            length, chunks, *setup.numbers, lists,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            D=size, BD=block_of(size), SHARED=layout.is_shared, **common,
        )  # fmt: skip
        return layout

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, item.name) for item in fields(self)[1:])

    @property
    def is_shared(self) -> bool:
        return min(self.setup.max_groups) > 1

    def spans(self, bytes_per_result: int) -> tuple[int, list[int]]:
        """Return the tokens of a span and where spans begin, for partial results of all heads of this size."""
        length = self.setup.key_groups.shape[2]
        per_token = len(self.setup.key_groups) * self.setup.max_groups[0] * bytes_per_result
        span = min(max(PARTIAL_BYTES // per_token // SPAN, 1) * SPAN, -(-length // SPAN) * SPAN)
        return span, list(range(0, length, span))

    def new_partial(self, span: int, heads: int, *size: int, dtype: torch.dtype) -> Tensor:
        """Return room for the results of each membership of `span` queries: `(B, G, span, R, HG, *size)`."""
        batch, groups = self.sorted_k.shape[:2]
        shape = (batch, groups, span, self.setup.max_groups[0], heads // groups, *size)
        return torch.empty(shape, dtype=dtype, device=self.sorted_k.device)


SETUP = "Tensor query_groups, Tensor key_groups, Tensor begins, Tensor? valid"
NUMBERS = "int query_groups_of_token, int key_groups_of_token, int window, int sinks, float scaling, float softcap"
LISTS = len(fields(Layout)) - 1
ATTEND = (
    f"(Tensor q, Tensor k, Tensor v, {SETUP}, Tensor? logits, Tensor? query_gates, Tensor? key_gates, {NUMBERS}, "
    f"float slope) -> ({', '.join(['Tensor'] * (2 + LISTS))})"
)
BACKWARD = (
    f"(Tensor dout, Tensor lse, Tensor delta, Tensor q, Tensor k, Tensor v, {SETUP}, Tensor[] lists, "
    f"Tensor? query_gates, Tensor? key_gates, {NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
ROUTE = (
    "(Tensor products, Tensor bias, Tensor worth_bias, Tensor limits, Tensor top_k, Tensor start, int local, "
    "bool is_pair, bool has_halves) -> (Tensor, Tensor)"
)


@torch.library.custom_op("focus_exp::gpu_attend", mutates_args=(), schema=ATTEND)
def gpu_attend(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return output, logsumexp, and the tensors of a `Layout`, which the backward reads; see `attend`."""
    setup, logits, args = read_arguments(others)
    layout = Layout.of(setup, k, v)
    return *attend(q, k, v, logits, layout, args), *layout.tensors


@gpu_attend.register_fake
def fake_attend(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        lse,
        *Layout.empty(read_arguments(others)[0], k, v).tensors,
    )


def read_arguments(others: tuple[Any, ...]) -> tuple[KernelInputs, Tensor | None, AttentionArgs]:
    """Return what the operator's arguments after q, k and v say."""
    *tensors, logits, _query_gates, _key_gates, per_query, per_key, window, sinks, scaling, softcap, _slope = others
    setup = KernelInputs.unpack(tensors, (per_query, per_key, window, sinks))
    return setup, logits, AttentionArgs(scaling, softcap or None)


@torch.library.custom_op("focus_exp::gpu_attend_backward", mutates_args=(), schema=BACKWARD)
def gpu_attend_backward(dout: Tensor, lse: Tensor, delta: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return the float32 gradients of q, k and v, and of both gates `(B, G, T, K)`, empty where not given."""
    q, k, v, *setup, lists, query_gates, key_gates, per_query, per_key, window, sinks, scaling, softcap = others
    layout = Layout(KernelInputs.unpack(setup, (per_query, per_key, window, sinks)), *lists)
    args, saved = AttentionArgs(scaling, softcap or None), (dout, lse, delta)
    dq, dquery_gates = backward_queries(q, k, v, saved, key_gates, layout, args)
    dk, dv, dkey_gates = backward_keys(q, k, v, saved, query_gates, layout, args)
    return dq, dk, dv, *(q.new_empty(0) if x is None else x.contiguous() for x in (dquery_gates, dkey_gates))


@gpu_attend_backward.register_fake
def fake_attend_backward(dout: Tensor, lse: Tensor, delta: Tensor, *others: Any) -> tuple[Tensor, ...]:
    q, k, v, _query_groups, key_groups, _begins, _valid, _lists, query_gates, *_ = others
    batch, _, length, groups = key_groups.shape
    shapes = [(batch, k.shape[1], length, groups) if query_gates is not None else (0,)] * 2
    dtype = torch.float32 if query_gates is not None else q.dtype
    gradients = (torch.empty(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    return *gradients, *(q.new_empty(shape, dtype=dtype) for shape in shapes)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, per_query, per_key, window, sinks, scaling, softcap, slope = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers, ctx.slope = (per_query, per_key, window, sinks, scaling, softcap), slope


@once_differentiable
def backward(ctx: Any, dout: Tensor, *_others: Any) -> tuple[Tensor | None, ...]:
    """Backward from out and lse of complete rows, so that the gradients of window and groups add up."""
    q, k, v, *setup, logits, query_gates, key_gates, out, lse = ctx.saved_tensors[:12]
    lists = list(ctx.saved_tensors[12:])
    dout = dout.to(out.dtype).contiguous()
    delta = (dout.float() * out.float()).sum(-1).T.contiguous()  # (H, n)
    gates = (query_gates, key_gates) if any(ctx.needs_input_grad[8:10]) else (None, None)
    dq, dk, dv, *dgates = gpu_attend_backward(dout, lse, delta, q, k, v, *setup, lists, *gates, *ctx.numbers)
    dlogits = None
    if logits is not None:  # p * (dP - delta) with dP = 0: the sink has no value
        split = (len(lse), len(logits), -1)
        weights = torch.exp(logits.T[..., None] - lse.view(split))
        dlogits = -(weights * delta.view(split)).sum(-1).T
    of_gates = [
        None if gate is None else dgate.mul(ctx.slope).sum_to_size(gate.shape).to(gate)
        for gate, dgate in zip(gates, dgates, strict=True)
    ]
    of_tokens = (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
    return *of_tokens, None, None, None, None, dlogits, *of_gates, *[None] * (len(ctx.numbers) + 1)


gpu_attend.register_autograd(backward, setup_context=save_for_backward)


def attend(
    q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, layout: Layout, args: AttentionArgs
) -> tuple[Tensor, Tensor]:
    """Return output `(n, H, D)` and natural logsumexp `(H, n)` of q, k, v `(n, H or G, D)`."""
    setup, (n, heads, size) = layout.setup, q.shape
    batch, lists, length, _ = setup.key_groups.shape
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(heads, n, device=q.device)
    span, firsts = layout.spans(heads * size * q.element_size())
    partial, partial_lse = (
        layout.new_partial(span, heads, *d, dtype=x) for d, x in (([size], q.dtype), ([], lse.dtype))
    )
    queries, keys = strides(q, k, v)
    common = score_settings(q, k, args)
    for first in firsts:
        chunks = chunk_range(first, span, length)
        launch(
            kernels().groups_forward, group_grid(layout, span, heads),
            q, layout.sorted_k, layout.sorted_v, partial, partial_lse, *query_lists(layout), length, *chunks, span,
            lists, *setup.max_groups, **queries, **common, **list_sizes(layout),
        )  # fmt: skip
        launch(
            kernels().window_forward, tiles(min(span, length - first), heads, batch),
            q, k, v, out, lse, setup.begins, setup.valid_or_placeholder, partial, partial_lse, layout.memberships,
            lse if logits is None else logits,
            n, length, first, span, lists, setup.max_groups[0], setup.window, setup.sinks,
            **queries, **keys, **common, heads=heads, BS=block_of(setup.sinks),
            VALID=setup.valid is not None, LOGITS=logits is not None,
        )  # fmt: skip
    return out, lse


def backward_queries(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, key_gates: Tensor | None, layout: Layout, args: AttentionArgs
) -> tuple[Tensor, Tensor | None]:
    """Return dq `(n, H, D)`, and `(B, G, T, K)`, the gradient of `query_gates`, given `key_gates` `(B, N, T, K)`.

    The straight-through gradient is that of slope * query_gates_i . key_gates_j added to the scores of distant pairs,
    here without the slope: sum_j dS_ij key_gates_j.
    """
    setup, (n, heads, size) = layout.setup, q.shape
    batch, lists, length, count = setup.key_groups.shape
    gate, gated = gate_arguments(key_gates, q)
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dgate = torch.empty(n, heads, count if key_gates is not None else 1, device=q.device)
    span, firsts = layout.spans(heads * (size * q.element_size() + 4 * dgate.shape[2]))
    partial = layout.new_partial(span, heads, size, dtype=q.dtype)
    partial_gate = layout.new_partial(span, heads, dgate.shape[2], dtype=torch.float32)
    queries, keys = strides(q, k, v)
    common = score_settings(q, k, args) | {"K": count, "BK": block_of(count), "GATED": key_gates is not None}
    for first in firsts:
        chunks = chunk_range(first, span, length)
        launch(
            kernels().groups_backward_queries, group_grid(layout, span, heads),
            q, layout.sorted_k, layout.sorted_v, *saved, partial, partial_gate, gate, *query_lists(layout), layout.keys,
            n, length, *chunks, span, lists, *setup.max_groups, gated,
            **queries, heads=heads, **common | list_sizes(layout),
        )  # fmt: skip
        launch(
            kernels().window_backward_queries, tiles(min(span, length - first), heads, batch),
            q, k, v, *saved, dq, dgate, setup.begins, setup.valid_or_placeholder, partial, partial_gate,
            layout.memberships,
            n, length, first, span, lists, setup.max_groups[0], setup.window, setup.sinks,
            unit=args.scaling,
            **queries, **keys, **common, heads=heads, BS=block_of(setup.sinks),
            VALID=setup.valid is not None,
        )  # fmt: skip
    if key_gates is None:
        return dq, None
    return dq, dgate.view(batch, length, k.shape[1], -1, count).sum(3).transpose(1, 2)


def backward_keys(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, query_gates: Tensor | None, layout: Layout, args: AttentionArgs
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dk, dv `(n, G, D)`, and `(B, G, T, K)`, the gradient of the key_gates, given the queries' query_gates."""
    setup, (n, heads, size), groups = layout.setup, q.shape, k.shape[1]
    batch, lists, length, count = setup.key_groups.shape
    gate, gated = gate_arguments(query_gates, q)
    sorted_dk, sorted_dv = (torch.empty(x.shape, device=q.device) for x in (layout.sorted_k, layout.sorted_v))
    width = count if query_gates is not None else 1
    sorted_gate = torch.empty(*sorted_dk.shape[:3], width, device=q.device)
    dk, dv = (torch.empty(n, groups, size, device=q.device) for _ in range(2))
    queries, keys = strides(q, k, v)
    common = score_settings(q, k, args)
    chunks = -(-length // CHUNK)
    launch(
        kernels().groups_backward_keys, group_grid(layout, length, heads, over_keys=True),
        q, layout.sorted_k, layout.sorted_v, *saved, sorted_dk, sorted_dv, sorted_gate, gate, *query_lists(layout),
        layout.keys, n, length, chunks, setup.window, lists, *setup.max_groups, gated, **queries, heads=heads,
        **common | list_sizes(layout) | {"K": count, "GATED": query_gates is not None},
    )  # fmt: skip
    common |= {"unit": args.scaling, "heads": heads, "VALID": setup.valid is not None}
    launch(
        kernels().window_backward_keys, tiles(length, groups, batch, over_keys=True),
        q, k, v, *saved, dk, dv, setup.valid_or_placeholder, sorted_dk, sorted_dv, layout.slots,
        n, length, lists, setup.max_groups[1], setup.window, **queries, **keys, **common,
    )  # fmt: skip
    if setup.sinks and length > setup.window + 1:
        block, spans = block_of(setup.sinks), -(-length // SINK_CHUNK)
        dk_sinks, dv_sinks = (torch.empty(batch, spans, groups, block, size, device=q.device) for _ in range(2))
        launch(
            kernels().sinks_backward, lambda *_: (spans, groups, batch),
            q, k, v, *saved, dk_sinks, dv_sinks, setup.begins, setup.valid_or_placeholder,
            n, length, setup.window, setup.sinks, SINK_CHUNK, BS=block, **queries, **keys, **common,
        )  # fmt: skip
        positions = setup.begins[:, None] + torch.arange(setup.sinks, device=q.device)
        row = (positions.clamp(max=length - 1) + length * torch.arange(batch, device=q.device)[:, None]).flatten()
        for total, part in ((dk, dk_sinks), (dv, dv_sinks)):
            total.index_add_(0, row, part.sum(1)[:, :, : setup.sinks].transpose(1, 2).flatten(0, 1))
    if query_gates is None:
        return dk, dv, None
    slots = layout.slots.view(batch, lists, -1, 1).expand(-1, groups, -1, width)
    by_slot = sorted_gate.gather(2, slots.clamp(min=0).long()).masked_fill(slots < 0, 0.0)
    return dk, dv, by_slot.view(batch, groups, length, -1, width).sum(3)


def pack_weights(weight: Tensor) -> Tensor:
    """Return float32 weights `(E, R)` as two matrices of bfloat16 side by side, whose sum they are: `(E, 2 R)`."""
    high = weight.bfloat16()
    return torch.cat([high, (weight - high).bfloat16()], 1)


def route(h: Tensor, weights: EncoderWeights, start: Tensor, local: int, is_pair: bool) -> tuple[Tensor, Tensor]:
    """Return the groups `(B, N, T, K)` bool of queries and of keys for hidden states `(B, T, E)`.

    Args:
        start: `(B, T)`, index of the first token of each token's sequence.
        local: tokens of window and sinks.
        is_pair: divide scores by the number of keys beyond them.
    """
    can_halve = can_multiply_halves(h)
    products = multiply_halves(h, weights.packed) if can_halve else h.flatten(0, 1).float() @ weights.weight
    selected = (weights.bias, weights.worth_bias, weights.limits, weights.top_k)
    queries, keys = gpu_route(products, *selected, start.contiguous(), local, is_pair, can_halve)
    return queries.view(torch.bool), keys.view(torch.bool)


@torch.library.custom_op("focus_exp::gpu_route", mutates_args=(), schema=ROUTE)
def gpu_route(products: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Return the groups `(B, N, T, K)` uint8 of queries and of keys, see the kernel `select_groups`."""
    *weights, start, local, is_pair, has_halves = others
    (batch, length), (heads, _, count) = start.shape, weights[0].shape
    queries, keys = fake_route(products, *others)
    numbers = (length, local, products.shape[1] // (1 + has_halves))
    sizes = {"K": count, "BK": block_of(count), "C": CHUNK, "PAIR": is_pair, "HALVES": has_halves}
    grid = (-(-length // CHUNK), heads, batch)
    kernels().select_groups[grid](products, *weights, start, queries, keys, *numbers, **sizes)
    return queries, keys


@gpu_route.register_fake
def fake_route(
    products: Tensor, bias: Tensor, worth_bias: Tensor, limits: Tensor, top_k: Tensor, start: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    (batch, length), (heads, _, count) = start.shape, bias.shape
    queries, keys = (products.new_empty(batch, heads, length, count, dtype=torch.uint8) for _ in range(2))
    return queries, keys


def can_multiply_halves(h: Tensor) -> bool:
    """Tell whether `multiply_halves` serves: bfloat16 on CUDA, without gradients."""
    return h.is_cuda and h.dtype == torch.bfloat16 and not torch.is_grad_enabled()


def multiply_halves(h: Tensor, halves: Tensor) -> Tensor:
    """Multiply hidden states `(B, T, E)` by both halves: `(B * T, 2 R)` float32, on tensor cores."""
    product: Tensor = torch.mm(h.flatten(0, 1), halves, out_dtype=torch.float32)
    return product


def project(h: Tensor, weight: Tensor) -> Tensor:
    """Multiply bfloat16 `(B, T, E)` by float32 `(E, R)` with the accuracy of float32."""
    product = multiply_halves(h, pack_weights(weight))
    return product.unflatten(1, (2, -1)).sum(1).unflatten(0, h.shape[:2])


def gate_arguments(gate: Tensor | None, q: Tensor) -> tuple[Tensor, int]:
    """Return a gate `(B, N, T, K)` in float32 and N, or a placeholder."""
    return (q, 1) if gate is None else (gate.float().contiguous(), gate.shape[1])


def chunk_range(first: int, span: int, length: int) -> tuple[int, int, int]:
    """Return the number of chunks of a sequence, and the first and the end of those of a span."""
    chunks = -(-length // CHUNK)
    return chunks, first // CHUNK, min((first + span) // CHUNK, chunks)


def query_lists(layout: Layout) -> tuple[Tensor, ...]:
    return layout.entries, layout.visible, layout.ahead, layout.query_bits, layout.key_bits


def list_sizes(layout: Layout) -> dict[str, Any]:
    return {"BK": layout.ahead.shape[-1], "SHARED": layout.is_shared}


def group_grid(layout: Layout, span: int, heads: int, over_keys: bool = False) -> Any:
    """Return the grid of a kernel of `groups`: as many programs as the device takes, at most one a tile."""
    batch, groups = layout.sorted_k.shape[:2]
    rows = span * layout.setup.max_groups[1] if over_keys else span * layout.setup.max_groups[0] * heads // groups
    most = max(1, PROGRAMS * processors(layout.ahead.device) // (groups * batch))
    count = layout.setup.key_groups.shape[-1]
    return lambda queries, keys: (min(most, -(-rows // (keys if over_keys else queries)) + count), groups, batch)


def tiles(length: int, *others: int, over_keys: bool = False) -> Any:
    return lambda queries, keys: (-(-length // (keys if over_keys else queries)), *others)


def strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Return the strides of queries, and those of keys and values."""
    values = {"v_row": v.stride(0), "v_head": v.stride(1)}
    return {"q_row": q.stride(0), "q_head": q.stride(1)}, {"k_row": k.stride(0), "k_head": k.stride(1), **values}


def score_settings(q: Tensor, k: Tensor, args: AttentionArgs) -> dict[str, Any]:
    """Return head sizes, units of scores and precision of products."""
    (_, heads, size), log2e = q.shape, 1 / math.log(2)  # the kernels' scores are in units of ln 2
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    sizes = {"HG": heads // k.shape[1], "D": size, "BD": block_of(size), "PRECISION": precision}
    units: dict[str, Any] = {"scale": args.scaling * log2e, "cap": 0.0, "SOFTCAP": False}
    if args.softcap is not None:
        units = {"scale": args.scaling / args.softcap, "cap": args.softcap * log2e, "SOFTCAP": True}
    return units | sizes


def block_of(size: int) -> int:
    """Return the block that holds `size` elements: a power of two, at least 16 for products of tiles."""
    return max(16, 1 << (max(size, 1) - 1).bit_length())


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch(*args: Any, **settings: Any) -> None:
    """Launch a kernel, see `tuning.launch`."""
    kernels().launch(*args, **settings)


@cache
def kernels() -> Any:
    """Import the Triton kernels on first use."""
    names = ("layout", "groups", "window", "tuning")
    modules = [importlib.import_module(f"focus_exp.attention.kernels.{name}") for name in names]
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


@cache
def import_error(package: str) -> str | None:
    """Return why a package cannot be imported; cached, since a failed search costs as much as a layer."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
    return None


@constant
def unavailable_reason() -> str | None:
    """Return why the kernels cannot run on this machine's GPU; None where they can."""
    missing = import_error("triton")
    return capability_reason((8, 0)) or (missing and f"needs the package triton: {missing}")


@constant
def capability_reason(needed: tuple[int, int]) -> str | None:
    """Return why the device's compute capability is too low."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= needed:
        return None
    has = ".".join(map(str, torch.cuda.get_device_capability()))
    return f"needs compute capability {'.'.join(map(str, needed))}, {torch.cuda.get_device_name()} has {has}"
