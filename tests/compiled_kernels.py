"""Compile every Triton kernel for a GPU that is not there: python tests/compiled_kernels.py [its capability: 90]."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from focus_exp.attention.kernels import decode_gpu, groups, layout, window

KERNELS = (
    *(layout.count_members, layout.scan_counts, layout.place_tokens, layout.select_groups),
    *(window.window_forward, window.window_backward_queries, window.window_backward_keys, window.sinks_backward),
    *(groups.groups_forward, groups.groups_backward_queries, groups.groups_backward_keys),
    *(decode_gpu.decode_span, decode_gpu.decode_merge),
)
HALF = "q k v out dout partial sorted_k sorted_v"
FULL = (
    "lse delta partial_lse sink_logits dq dk dv dgate gate partial_gate sorted_dk sorted_dv sorted_gate products bias "
    "worth_bias limits sums states"
)
BYTES, INT = (
    "valid query_groups key_groups seen",
    "key_words query_words far near begins entries visible ahead keys slots memberships counts top_k",
)
TYPES = {"*bf16": HALF, "*fp32": FULL, "*u8": BYTES, "*i32": INT, "*i64": "query_bits key_bits start"}
POINTERS = {name: kind for kind, names in TYPES.items() for name in names.split()}
FLOAT = "scale cap unit"
SIZES = {
    "HG": 4, "D": 48, "BD": 64, "BM": 32, "BN": 32, "BS": 16, "K": 8, "BK": 16, "C": 64, "BC": 64, "PRECISION": "tf32",
    "BH": 16, "DV": 48, "BDV": 64, "W": 2,
}  # fmt: skip


def compiled(kernel: object, capability: int, **constants: object) -> triton.compiler.CompiledKernel:
    """With every option on."""
    function = kernel
    constants = {n: (SIZES | constants).get(n, True) for n in function.arg_names if n.isupper()}
    types = {n: "fp32" if n in FLOAT.split() else POINTERS.get(n, "i32") for n in function.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})


if __name__ == "__main__":
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    for kernel in KERNELS:
        found = compiled(kernel, capability)
        print(f"{kernel.__name__}: sm_{capability}, {found.metadata.shared:,} bytes of shared memory")
