"""One line per method: what `attention.method` may name."""

from __future__ import annotations

from typing import Any

from focus_exp.attention.baselines.longformer import Longformer
from focus_exp.attention.baselines.magicpig import MagicPIG
from focus_exp.attention.baselines.performer import Performer
from focus_exp.attention.baselines.random_groups import RandomGroups
from focus_exp.attention.baselines.routing_transformer import RoutingTransformer
from focus_exp.attention.baselines.sparq import SparQ
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.attention.focus import Focus
from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.options import check_options

METHODS: dict[str, type[AttentionMethod]] = {
    "focus": Focus,
    "window": WindowOnly,
    "random_groups": RandomGroups,
    "longformer": Longformer,
    "performer": Performer,
    "routing_transformer": RoutingTransformer,
    "sparq": SparQ,
    "magicpig": MagicPIG,
}


def build(method: str, shape: LayerShape, **options: Any) -> AttentionMethod:
    """A method's module for one layer; KeyError for an unknown name, ValueError for an option or value it refuses."""
    check_options(METHODS[method], options)
    return METHODS[method](shape, **options)
