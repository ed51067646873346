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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import cpp_extension

from focus_exp.attention.kernels.contract import (
    MAX_HEAD_DIM,
    Backend,
    BackendUnsupported,
    EncoderWeights,
    KernelRequirements,
    constant,
)
from focus_exp.attention.kernels.measured import Times, least_seconds, read_or_measure
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, distant_keys

log = logging.getLogger(__name__)

Pair = tuple[Tensor | None, Tensor | None]

NAMES = ("cpu_sparse.cpp", "cpu_decode.h", "cpu_sparse_tiles.h")
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
THREADS = "-fopenmp"  # without it torch's headers run all tasks on one thread; its library comes with torch
FLAGS = ["-O3", "-Wno-psabi", THREADS]
DTYPES = (torch.float32, torch.bfloat16)
MAX_GROUPS = 64  # bits of a word
NO_REACH = 1 << 40
FULL_WINDOW = 64  # keys of full attention that meet a query under a mask; the rest meets it without
FULL_FROM = 256  # tokens from which full attention may be faster than torch's (AVX-512: 1.2 to 3 times)
TIMED = (1, 8, 1024, 64)  # queries, keys and values of the comparison


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
        if requirements.groups > MAX_GROUPS:
            return f"takes up to {MAX_GROUPS} groups, not {requirements.groups}"
        return unavailable_reason()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        assert selection.query_groups is not None and selection.key_groups is not None
        queries, keys = (x if x.ndim == 4 else x[:, None] for x in (selection.query_groups, selection.key_groups))
        heads = max(queries.shape[1], keys.shape[1])
        queries, keys = (x.expand(-1, heads, -1, -1).contiguous() for x in (queries, keys))
        gates: Pair = (None, None)
        if args.ste_slope and selection.assignment is not None:
            query_gates, key_gates = (
                (x if x.ndim == 4 else x[:, None]).expand(-1, heads, -1, -1)
                for x in (selection.assignment, selection.effective_key_assignment)
            )
            gates = (query_gates, key_gates)
        if sequence.allowed is not None and sequence.reach is None:
            raise BackendUnsupported(f"backend={self.name} takes no such mask of the base model; use backend=masked")
        return attend((q, k, v), (queries, keys), gates, sequence.valid, args, sequence.reach or NO_REACH)


def pack_weights(weight: Tensor) -> Tensor:
    """Return weights `(E, R)` in blocks of 16 columns, padded with zeros: `(R / 16, E, 16)`."""
    columns = F.pad(weight, (0, -weight.shape[1] % 16))
    return columns.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()


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


def attend_fully(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, reach: int | None = None, valid: Tensor | None = None
) -> Tensor:
    """Compute causal attention `(B, H, T, D)` to keys `(B, G, T, D)`: all, or those less than `reach` tokens before.

    Args:
        valid: `(B, T)` bool, False on padding, which is not between tokens.
    """
    args = replace(args, window=FULL_WINDOW, sinks=0, ste_slope=None)
    return attend((q, k, v), (None, None), (None, None), valid, args, reach or NO_REACH)


def attend(
    qkv: tuple[Tensor, Tensor, Tensor], groups: Pair, gates: Pair, valid: Tensor | None, args: AttentionArgs, reach: int
) -> Tensor:
    """Call the operator `attend`; its gates have gradients alone: those of the straight-through estimator."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in qkv)
    logits = None if args.sink_logits is None else args.sink_logits.float().contiguous()
    scores = (args.scaling, args.softcap or 0.0, args.ste_slope or 0.0)
    local = (args.window, args.sinks, reach)
    out: Tensor = load_operators().attend(q, k, v, *groups, valid, logits, *gates, *local, *scores)[0]
    return out.transpose(1, 2)


def is_fastest_full_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> bool:
    """Tell whether `attend_fully` serves and is faster than torch's: for whole sequences of some length."""
    if q.device.type != "cpu" or q.shape[2] < FULL_FROM or k.shape[2] != q.shape[2] or args.dropout:
        return False
    return serves_full(q, v) and is_faster_than_torch(q.dtype)


def serves_full(q: Tensor, v: Tensor) -> bool:
    """Tell whether `attend_fully` serves tensors of this dtype and these head sizes."""
    return q.dtype in DTYPES and max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM and unavailable_reason() is None


@constant
def is_faster_than_torch(dtype: torch.dtype) -> bool:
    """Tell whether full attention is faster than torch's, which has AMX for bfloat16 where this kernel has not.

    Measured once a kind of processor and number of threads, in 0.1 s; kept next to the kernel.
    """
    has_amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
    kind = f"{torch.backends.cpu.get_cpu_capability()}{' with AMX' if has_amx else ''}"
    key, path = f"{dtype}, {kind}, {torch.get_num_threads()} threads", kernel_folder() / "times.json"
    times = read_or_measure(path, key, lambda: time_full_attention(dtype))
    return times["kernel"] < times["torch"]


@torch.no_grad()
def time_full_attention(dtype: torch.dtype) -> Times:
    """Return the seconds of the kernel and of torch."""
    q = torch.ones(TIMED, dtype=dtype)
    works = {
        "kernel": lambda: attend_fully(q, q, q, AttentionArgs(1.0)),
        "torch": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    }
    return least_seconds(works, repeats=5)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query_groups, key_groups, valid, sink_logits, query_gates, key_gates, *options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, query_groups, key_groups, valid, sink_logits, query_gates, key_gates, *output)
    ctx.options = options


@once_differentiable
def backward(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, the sink logits and both soft assignments."""
    q, k, v, query_groups, key_groups, valid, sink_logits, query_gates, key_gates, out, lse = ctx.saved_tensors
    *options, ste_slope = ctx.options
    dout = dout.to(out.dtype).contiguous()
    gates = (query_gates, key_gates) if any(ctx.needs_input_grad[7:9]) else (None, None)
    soft = [None if x is None else x.float().contiguous() for x in gates]
    dq, dk, dv, *dgates = torch.ops.focus_exp.attend_backward(
        dout, q, k, v, out, lse, query_groups, key_groups, valid, *soft, *options
    )
    of_gates: list[Tensor | None] = [None, None]
    if gates[0] is not None:
        of_gates = [
            (dg.sum(1, keepdim=True) if gate.shape[1] == 1 else dg).mul(ste_slope).to(gate.dtype)
            for dg, gate in zip(dgates, gates, strict=True)
        ]
    dsink = None
    if sink_logits is not None:  # p * (dP - sum_d dO O), where dP is 0: it has no value
        p = torch.exp(sink_logits[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
        dsink = -(p * (dout.float() * out.float()).sum(-1).transpose(1, 2)).sum((0, 2))
    of_tokens = [dx.transpose(1, 2).to(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v))]
    return *of_tokens, None, None, None, dsink, *of_gates, *[None] * len(ctx.options)


def fake_attend(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[3]), q.new_empty(batch, heads, length, dtype=torch.float32)


def fake_attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _out, _lse, _query_groups, key_groups, _valid, query_gates, *_ = others
    (batch, heads, length, size), kv_heads = q.shape, k.shape[1]
    groups = 0 if query_gates is None or key_groups is None else key_groups.shape[3]
    shapes = [(heads, size), (kv_heads, size), (kv_heads, v.shape[3])]
    gates = [q.new_empty(batch, kv_heads, length, groups, dtype=torch.float32) for _ in range(2)]
    return *(q.new_empty(batch, length, *shape, dtype=torch.float32) for shape in shapes), *gates


def fake_route(h: Tensor, weight: Tensor, bias: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    (batch, length, _), (heads, _, groups) = h.shape, bias.shape
    queries, keys = (h.new_empty(batch, heads, length, groups, dtype=torch.bool) for _ in range(2))
    return queries, keys


def load_operators() -> Any:
    """Return the kernel's operators.

    Raises:
        BackendUnsupported: they could not be built.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise BackendUnsupported(reason)
    return torch.ops.focus_exp


@constant
def unavailable_reason() -> str | None:
    """Load the kernel, compiled if needed; return why it is not available, or None."""
    folder = kernel_folder()
    built = folder / "focus_exp_cpu_sparse.so"
    try:
        if not built.exists():
            compile_kernel(folder, build_flags())
        torch.ops.load_library(str(built))
        register_operators()
    except Exception as error:  # whatever a compiler, a linker or a full disk says: the masked path serves
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0])
        log.warning("CPU kernel: not available, the masked path serves instead (%s)", reason)
        return f"could not be built: {reason}"
    log.info("CPU kernel: instruction set %s", torch.ops.focus_exp.use_isa(""))
    return None


def build_flags() -> list[str]:
    return [*FLAGS, *os.environ.get("FOCUS_EXP_CXXFLAGS", "").split()]


def kernel_folder() -> Path:
    """Return the folder in the cache of the kernel of this source, torch and machine."""
    sources = (path.read_text(encoding="utf-8") for path in SOURCES)
    identity = [torch.__version__, platform.machine(), *build_flags(), *sources]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    root = Path(os.environ.get("FOCUS_EXP_CACHE") or Path.home() / ".cache" / "focus_exp").expanduser()
    return root / "kernels" / f"cpu_sparse-{digest}"


def register_operators() -> None:
    """Tell torch the shapes and the gradients of the operators that the library has."""
    torch.library.register_fake("focus_exp::attend", fake_attend)
    torch.library.register_fake("focus_exp::attend_backward", fake_attend_backward)
    torch.library.register_fake("focus_exp::route", fake_route)
    torch.library.register_autograd("focus_exp::attend", backward, setup_context=save_for_backward)


def compile_kernel(folder: Path, flags: list[str]) -> None:
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
        options: dict[str, Any] = {"extra_cflags": compile_flags(flags), "extra_ldflags": link_flags(flags)}
        options |= {"build_directory": str(folder), "is_python_module": False}
        cpp_extension.load("focus_exp_cpu_sparse", [str(SOURCES[0])], **options)
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
