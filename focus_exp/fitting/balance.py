"""Balance of the groups of attached routers, which training moves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.focus import Focus
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.fitting.focus import calibrate
from focus_exp.fitting.focus_dual import rebalance
from focus_exp.models.methods import attached_methods
from focus_exp.training.precision import Precision

BALANCES: dict[type[AttentionMethod], Callable[[PreTrainedModel, list[Tensor], Precision], None]] = {
    Focus: calibrate,
    FocusDual: rebalance,
}


def balance_groups(model: PreTrainedModel, sequences: list[Tensor], precision: Precision) -> None:
    """Balance the groups of hard routing on `sequences`, each `(T,)` token ids."""
    methods = attached_methods(model).values()
    for method, balance in BALANCES.items():
        if any(isinstance(attached, method) for attached in methods):
            balance(model, sequences, precision)
