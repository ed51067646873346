"""Hard-routed and full causal attention on a CPU: one C++ kernel, compiled on first use (`cpu_sparse.cpp`).

torch has no CPU kernel for ragged key lists: flex_attention computes whole blocks of the mask, and nested tensors have
no fused attention on a CPU.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import cpp_extension

from focus_exp.attention.kernels.contract import (
    MAX_HEAD_DIM,
    Backend,
    BackendUnsupported,
    EncoderWeights,
    KernelRequirements,
)
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, distant_keys

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("cpu_sparse.cpp", "cpu_sparse_tiles.h")]
THREADS = "-fopenmp"  # without it torch's headers run all tasks on one thread; its library comes with torch
FLAGS = ["-O3", "-Wno-psabi", THREADS]
DTYPES = (torch.float32, torch.bfloat16)
MAX_GROUPS = 64  # bits of a word
NO_REACH = 1 << 40
FULL_WINDOW = 64  # keys of full attention that meet a query under a mask; the rest meets it without
FULL_FROM = 256  # tokens from which full attention is faster than torch's (AVX-512: 1.2 to 3 times)


class CpuSparse(Backend):
    """Every selection of up to 64 groups, float32 and bfloat16, head sizes up to 256; with a backward.

    Instruction sets: AVX-512 with and without bf16 products, AVX2, and portable vectors (SSE2, NEON); no AMX.
    """

    name = "cpu"
    device = "cpu"
    place = "the CPU"
    dtypes = DTYPES
    takes_reach = True

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        if reason := super().unsupported_reason(requirements):
            return reason
        if torch.compiler.is_compiling():
            return "is not traced by torch.compile"
        if requirements.groups > MAX_GROUPS:
            return f"takes up to {MAX_GROUPS} groups, not {requirements.groups}"
        return unavailable_reason()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        assert selection.query_groups is not None and selection.key_groups is not None
        groups = [x if x.ndim == 4 else x[:, None] for x in (selection.query_groups, selection.key_groups)]
        gates: list[Tensor | None] = [None, None]
        if args.ste_slope and selection.assignment is not None:
            pair = (selection.assignment, selection.effective_key_assignment)
            gates = [x if x.ndim == 4 else x[:, None] for x in pair]
        heads = max(x.shape[1] for x in groups)
        if sequence.allowed is not None and sequence.reach is None:
            raise BackendUnsupported(f"backend={self.name} takes no such mask of the base model; use backend=masked")
        groups = [x.expand(-1, heads, -1, -1).contiguous() for x in groups]
        gates = [x if x is None else x.expand(-1, heads, -1, -1) for x in gates]
        options = (args.window, args.sinks, sequence.reach or NO_REACH, args.scaling, args.softcap or 0.0)
        return Attention.apply(q, k, v, *gates, args.sink_logits, groups, find_span(sequence), args.ste_slope, options)


def route(h: Tensor, weights: EncoderWeights, start: Tensor, local: int, is_pair: bool) -> tuple[Tensor, Tensor]:
    """Return the groups `(B, N, T, K)` bool of queries and of keys for hidden states `(B, T, E)`.

    Args:
        start: `(B, T)`, index of the first token of each token's sequence.
        local: tokens of window and sinks.
        is_pair: divide scores by the number of keys beyond them.
    """
    penalty = None
    if is_pair:
        count = distant_keys(torch.arange(h.shape[1]) - start, local)
        penalty = count.expand(h.shape[:2]).float().log1p().contiguous()
    groups: tuple[Tensor, Tensor] = load_operators().route(
        h, weights.packed, weights.bias, weights.worth_bias, weights.limits, weights.top_k, penalty
    )
    return groups


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, reach: int | None = None, span: Tensor | None = None
) -> Tensor:
    """Compute causal attention `(B, H, T, D)` to keys `(B, G, T, D)`: all, or those less than `reach` tokens before.

    Args:
        span: see `padding_span`.
    """
    options = (FULL_WINDOW, 0, reach or NO_REACH, args.scaling, args.softcap or 0.0)
    return Attention.apply(q, k, v, None, None, args.sink_logits, (None, None), span, None, options)


def is_fastest_full_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> bool:
    """Tell whether `full_attention` serves and is faster than torch's: for whole sequences of some length."""
    if q.device.type != "cpu" or q.shape[2] < FULL_FROM or k.shape[2] != q.shape[2] or args.dropout:
        return False
    if torch.compiler.is_compiling() or (q.dtype == torch.bfloat16 and has_amx()):
        return False
    return serves_full(q, v)


def serves_full(q: Tensor, v: Tensor) -> bool:
    """Tell whether `full_attention` serves tensors of this dtype and these head sizes."""
    return q.dtype in DTYPES and max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM and unavailable_reason() is None


@cache
def has_amx() -> bool:
    """Tell whether torch multiplies bfloat16 by AMX, which this kernel does not."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def find_span(sequence: Sequence) -> Tensor | None:
    """Return `(B, 2)` int, the first token of each sequence and the end of its tokens; None without padding.

    Raises:
        BackendUnsupported: padding between tokens, or several sequences in a row.
    """
    valid, start = sequence.valid, sequence.start
    if valid is None:
        if bool(start.any()):
            raise BackendUnsupported("the CPU kernel takes one sequence a row; use backend=masked")
        return None
    span = padding_span(valid)
    if span is None or bool((valid & (start != span[:, :1])).any()):
        raise BackendUnsupported("the CPU kernel takes one sequence a row, without padding inside; use backend=masked")
    return span


def padding_span(valid: Tensor) -> Tensor | None:
    """Return `(B, 2)` int, the first token of each row and the end of its tokens; None with padding between them.

    Args:
        valid: `(B, T)` bool, False on padding.
    """
    begin = valid.byte().argmax(1)
    end = begin + valid.sum(1)
    place = torch.arange(valid.shape[1], device=valid.device)
    inside = (place >= begin[:, None]) & (place < end[:, None])
    return torch.stack([begin, end], 1) if torch.equal(inside, valid) else None


class Attention(torch.autograd.Function):
    """Run the kernel's forward and backward; add the gradients of soft assignments and of the base model's sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        asks: Tensor | None,
        answers: Tensor | None,
        sink_logits: Tensor | None,
        groups: tuple[Tensor | None, Tensor | None],
        span: Tensor | None,
        ste_slope: float | None,
        options: tuple[int, int, int, float, float],
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        logits = None if sink_logits is None else sink_logits.float().contiguous()
        out, lse = load_operators().attend(q, k, v, *groups, span, logits, *options)
        ctx.save_for_backward(q, k, v, asks, answers, sink_logits, out, lse, *groups, span)
        ctx.ste_slope, ctx.options = ste_slope, options
        result: Tensor = out.transpose(1, 2)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, asks, answers, sink_logits, out, lse, *groups, span = ctx.saved_tensors
        dout = grads[0].transpose(1, 2).to(out.dtype).contiguous()
        gates = (asks, answers) if any(ctx.needs_input_grad[3:5]) else (None, None)
        soft = [None if x is None else x.float().contiguous() for x in gates]
        dq, dk, dv, *dgates = load_operators().attend_backward(
            dout, q, k, v, out, lse, *groups, span, *soft, *ctx.options
        )
        of_gates: list[Tensor | None] = [None, None]
        if gates[0] is not None:
            of_gates = [
                (dg.sum(1, keepdim=True) if gate.shape[1] == 1 else dg).mul(ctx.ste_slope).to(gate.dtype)
                for dg, gate in zip(dgates, gates, strict=True)
            ]
        dsink = None
        if sink_logits is not None:  # p * (dP - sum_d dO O), where dP is 0: it has no value
            p = torch.exp(sink_logits.float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
            delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
            dsink = -(p * delta).sum((0, 2)).to(sink_logits.dtype)
        return (
            *(dx.transpose(1, 2).to(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v))),
            *(*of_gates, dsink, None, None, None, None),
        )


def load_operators() -> Any:
    """Return the kernel's operators.

    Raises:
        BackendUnsupported: they could not be built.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise BackendUnsupported(reason)
    return torch.ops.focus_exp


@cache
def unavailable_reason() -> str | None:
    """Load the kernel, compiled if needed; return why it is not available, or None."""
    flags = [*FLAGS, *os.environ.get("FOCUS_EXP_CXXFLAGS", "").split()]
    identity = [torch.__version__, platform.machine(), *flags, *(path.read_text(encoding="utf-8") for path in SOURCES)]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    root = Path(os.environ.get("FOCUS_EXP_CACHE") or Path.home() / ".cache" / "focus_exp").expanduser()
    folder = root / "kernels" / f"cpu_sparse-{digest}"
    built = folder / "focus_exp_cpu_sparse.so"
    try:
        if not built.exists():
            build(folder, flags)
        torch.ops.load_library(str(built))
    except Exception as error:  # whatever a compiler, a linker or a full disk says: the masked path serves
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0])
        log.warning("CPU kernel: not available, the masked path serves instead (%s)", reason)
        return f"could not be built: {reason}"
    log.info("CPU kernel: instruction set %s", torch.ops.focus_exp.use_isa(""))
    return None


def build(folder: Path, flags: list[str]) -> None:
    """Compile the kernel into `folder`; one process compiles, the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / "build.lock"):
        if (folder / "focus_exp_cpu_sparse.so").exists():
            return
        log.info("CPU kernel: compiling, once for this torch and machine")
        started = time.monotonic()
        with suppress(ImportError):  # its program is not on the PATH of an environment that is not activated
            import ninja

            os.environ["PATH"] += os.pathsep + ninja.BIN_DIR
        with suppress(OSError):  # torch's own lock file, which a killed build leaves for ever
            (folder / "lock").unlink()
        cpp_extension.load(
            "focus_exp_cpu_sparse", [str(SOURCES[0])], build_directory=str(folder), is_python_module=False,
            extra_cflags=compile_flags(flags), extra_ldflags=link_flags(flags),
        )  # fmt: skip
        log.info("CPU kernel: compiled in %.1f s", time.monotonic() - started)


def compile_flags(flags: list[str]) -> list[str]:
    """Return flags for this compiler: the threads of clang need a library that torch does not bring."""
    is_gcc = cpp_extension.check_compiler_is_gcc(cpp_extension.get_cxx_compiler())
    return flags if is_gcc else [flag for flag in flags if flag != THREADS]


def link_flags(flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag.startswith("-fsanitize")]


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process; without file locks it does nothing."""
    with path.open("a") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
