"""Find methods by name: those of this package, and any class by its dotted path."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import focus_exp.attention.focus
import focus_exp.attention.focus_dual  # noqa: F401  (both register their class)
from focus_exp.attention import baselines
from focus_exp.attention.base import METHODS, AttentionMethod, LayerShape

for module in pkgutil.iter_modules(baselines.__path__, f"{baselines.__name__}."):
    importlib.import_module(module.name)


def find(method: str, *, imports: bool = True) -> type[AttentionMethod]:
    """Return the class named `method`, or at the dotted path package.module.Class.

    Args:
        imports: False requires the module of a path to be imported already, so that a name in a downloaded file
            runs no code.

    Raises:
        ValueError: there is no such method.
    """
    if method in METHODS:
        return METHODS[method]
    path, _, name = method.rpartition(".")
    if not path:
        raise ValueError(f"attention method must be one of {', '.join(sorted(METHODS))} (got {method!r})")
    if not imports and path not in sys.modules:
        raise ValueError(f"attention method {method!r} is not part of focus_exp. Import {path} first.")
    try:
        cls = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"attention method {method!r} not importable ({error}). Put {path} on PYTHONPATH.") from error
    if not (isinstance(cls, type) and issubclass(cls, AttentionMethod)):
        raise ValueError(f"attention method {method!r} must be a subclass of AttentionMethod")
    return cls


def build(method: str, shape: LayerShape, **options: Any) -> AttentionMethod:
    """Build a method for one layer; ValueError for an unknown name, option or an invalid value."""
    return find(method).create(shape, **options)
