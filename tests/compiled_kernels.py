"""Compile every Triton kernel for a GPU that is not there: python tests/compiled_kernels.py [its capability: 90]."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from focus_exp.attention.kernels import groups, window

KERNELS = (
    *(window.window_forward, window.window_backward_queries, window.window_backward_keys, window.sinks_backward),
    *(groups.groups_forward, groups.groups_backward_queries, groups.groups_backward_keys),
)
HALF, LONG, FLOAT = "q k v out dout other_out", "lower bits", "scale cap unit slope"
FULL = "lse delta other_lse sink_logits dq dk dv dgate gate"
INT = "begins valid tags_q tags_k place queries first stop keys"
POINTERS = {name: "*bf16" for name in HALF.split()} | {name: "*i64" for name in LONG.split()}
POINTERS |= {name: "*i32" for name in INT.split()} | {"valid": "*u8"}
POINTERS |= {name: "*fp32" for name in FULL.split()}
SIZES = {"HG": 4, "D": 48, "BD": 64, "BM": 32, "BN": 32, "BS": 16, "K": 8, "BK": 16, "PRECISION": "tf32"}


def compiled(kernel: object, capability: int, **constants: object) -> triton.compiler.CompiledKernel:
    """With every option on."""
    function = kernel.fn
    constants = {n: (SIZES | constants).get(n, True) for n in function.arg_names if n.isupper()}
    types = {n: "fp32" if n in FLOAT.split() else POINTERS.get(n, "i32") for n in function.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})


if __name__ == "__main__":
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    for kernel in KERNELS:
        found = compiled(kernel, capability)
        print(f"{kernel.fn.__name__}: sm_{capability}, {found.metadata.shared:,} bytes of shared memory")
