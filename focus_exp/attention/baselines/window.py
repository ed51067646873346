"""Control: window and sinks, no distant pair at all (StreamingLLM's mask; Longformer's without globals)."""

from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.options import NearOptions


class WindowOnly(AttentionMethod, name="window", options=NearOptions):
    """Keeps i - j <= window and the first `sinks` tokens."""

    def __init__(self, shape: LayerShape, options: NearOptions) -> None:
        super().__init__(shape, options.window, options.sinks)

    def refuses_cache(self) -> None:
        return None
