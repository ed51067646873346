"""Control: window and sinks, no distant pair (StreamingLLM's mask; Longformer's without globals)."""

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.options import LocalOptions


class WindowOnly(AttentionMethod, name="window", options=LocalOptions):
    """Keep i - j <= window and the first `sinks` tokens."""

    def __init__(self, shape: LayerShape, options: LocalOptions) -> None:
        super().__init__(shape, options.window, options.sinks)

    def kv_cache_unsupported_reason(self) -> None:
        return None
