"""Focus: sparse attention by learned token groups, added to a frozen Hugging Face language model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from focus_exp.errors import UserError
    from focus_exp.models.adapter import load_adapter, push_to_hub, save_adapter
    from focus_exp.models.attach import attach, detach
    from focus_exp.models.attached import disabled, freeze, is_causal, set_routing

__version__ = "0.1.0"

# imported on first use, so that reading records does not load torch
_HOMES = {
    "UserError": "focus_exp.errors",
    "load_adapter": "focus_exp.models.adapter",
    "push_to_hub": "focus_exp.models.adapter",
    "save_adapter": "focus_exp.models.adapter",
    "attach": "focus_exp.models.attach",
    "detach": "focus_exp.models.attach",
    "disabled": "focus_exp.models.attached",
    "freeze": "focus_exp.models.attached",
    "is_causal": "focus_exp.models.attached",
    "set_routing": "focus_exp.models.attached",
}
__all__ = [
    "UserError",
    "attach",
    "detach",
    "disabled",
    "freeze",
    "is_causal",
    "load_adapter",
    "push_to_hub",
    "save_adapter",
    "set_routing",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'focus_exp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
