"""Methods by their names: those of this package, and any class of yours by the path that imports it."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import focus_exp.attention.dual
import focus_exp.attention.focus  # noqa: F401  (both declare themselves)
from focus_exp.attention import baselines
from focus_exp.attention.method import METHODS, AttentionMethod, LayerShape

for module in pkgutil.iter_modules(baselines.__path__, f"{baselines.__name__}."):
    importlib.import_module(module.name)


def find(method: str, *, imports: bool = True) -> type[AttentionMethod]:
    """The class that is called `method`, or whose dotted path it is: package.module.Class.

    ValueError for what is none. Without `imports` the module of a path must be there already: a name out of a file that
    somebody else wrote runs no code.
    """
    if method in METHODS:
        return METHODS[method]
    path, _, name = method.rpartition(".")
    if not path:
        raise ValueError(f"attention method {method!r} is not known; choose from {', '.join(sorted(METHODS))}")
    if not imports and path not in sys.modules:
        raise ValueError(
            f"attention method {method!r} is not of focus_exp; import {path}, or choose it with attention=, first"
        )
    try:
        found = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"attention method {method!r} cannot be imported ({error}); is the folder of {path} on PYTHONPATH?"
        ) from error
    if not (isinstance(found, type) and issubclass(found, AttentionMethod)):
        raise ValueError(f"attention method {method!r} is no subclass of AttentionMethod")
    return found


def build(method: str, shape: LayerShape, **options: Any) -> AttentionMethod:
    """A method's module for one layer; ValueError for an unknown name, and for an option or value that it refuses."""
    return find(method).of(shape, **options)
