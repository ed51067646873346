"""Where a model's attention layers are, and what is attached to them."""

from __future__ import annotations

from torch import nn

from focus_exp.attention.method import AttentionMethod
from focus_exp.errors import UserError

ATTENTION_MODULES = ("self_attn", "attn", "attention")


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The self-attention modules by layer index; UserError naming the model's modules if there are none."""
    found = {
        int(module.layer_idx): module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in ATTENTION_MODULES and hasattr(module, "layer_idx")
    }
    if not found:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise UserError(
            f"{type(model).__name__} has no attention layer called {' or '.join(ATTENTION_MODULES)}; "
            f"its modules are {', '.join(kinds)}"
        )
    return dict(sorted(found.items()))


def method_of(module: nn.Module) -> AttentionMethod:
    """The method that is attached to an attention layer."""
    method = module.focus
    assert isinstance(method, AttentionMethod)
    return method


def attached_methods(model: nn.Module) -> dict[int, AttentionMethod]:
    """The attached modules by layer index."""
    return {i: method_of(m) for i, m in attention_modules(model).items() if hasattr(m, "focus")}
