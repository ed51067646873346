"""Control: window and sinks, no distant pair at all (StreamingLLM's mask; Longformer's without globals)."""

from focus_exp.attention.method import AttentionMethod


class WindowOnly(AttentionMethod):
    """Keeps i - j <= window and the first `sinks` tokens."""

    def refuses_cache(self) -> None:
        return None
