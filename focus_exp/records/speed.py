"""What a clock measured: one attention beside full attention, at one length."""

from dataclasses import dataclass
from typing import Literal

MASKED = "masked"  # the path of a method that computes every pair and saves nothing

Clock = Literal["kernels", "attention", "prefill", "attention step", "model step", "decode", "decode model"]
Assignment = Literal["balanced", "trained"]


@dataclass(kw_only=True)
class SpeedRow:
    """Focus and full attention, alternated in one run on the same tensors, at one length.

    clock: what was timed. "kernels": the exact attention calls alone, their tokens already gathered. "attention":
        with routing, selection, sort, gather and merge, as a layer pays it. "prefill": the whole model's forward
        pass. "attention step", "model step": forward and backward. "decode", "decode model": one more token after
        `tokens`, in one layer's attention and in the whole model; there the pairs are those of that token, and the
        peaks what the caches hold.
    Times are medians over `repeats` in seconds, peaks are bytes held at most, inputs included.
    pairs_kept: share 0..1 of the causal pairs; 1 / pairs_kept bounds the ratio of an attention clock.
    pairs_computed: likewise those that the kernel's blocks compute, with what they drop; 1 / pairs_computed is the
        bound of this kernel.
    layer: heads and head size, in words.
    *_bytes_read: keys and values that a decode step reads.
    *_attention_seconds: the part of a prefill that was spent in routing and attention.
    A row that failed carries `error` and no times.
    """

    clock: Clock
    tokens: int
    groups: int
    assignment: Assignment
    top_k: int = 1
    pair_rule: str = "query_topk"
    window: int = 128
    layer: str = ""
    dtype: str = ""
    full_kernel: str = ""
    path: str = ""
    repeats: int = 0
    full_seconds: float | None = None
    focus_seconds: float | None = None
    full_attention_seconds: float | None = None
    focus_attention_seconds: float | None = None
    full_peak_bytes: int | None = None
    focus_peak_bytes: int | None = None
    full_bytes_read: int | None = None
    focus_bytes_read: int | None = None
    pairs_kept: float | None = None
    pairs_computed: float | None = None
    largest_group: float | None = None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster than full attention."""
        if not self.full_seconds or not self.focus_seconds:
            return None
        return self.full_seconds / self.focus_seconds

    @property
    def bound(self) -> float | None:
        """The arithmetic bound of `ratio`: pairs of full attention over pairs of Focus."""
        return 1 / self.pairs_kept if self.pairs_kept else None

    @property
    def kernel_bound(self) -> float | None:
        """The bound of `ratio` by the kernel's blocks, where those are known."""
        return 1 / self.pairs_computed if self.pairs_computed else None


@dataclass(kw_only=True)
class MethodSpeedRow:
    """Another method and full attention, alternated in one run on the same tensors.

    clock: "attention" is one layer, routing included, on random tensors; "prefill" the whole model's forward pass with
        what is attached to it, the router as it was fitted or trained, on held-out text.
    path: how the method is computed here; "masked" computes every pair and saves nothing.
    pairs_kept, largest_group: shares 0..1, by layer on average, where a whole model is timed.
    *attention_seconds: the part of a prefill that was spent in routing and attention.
    Times are medians over `repeats` in seconds, peaks are bytes. A row that failed carries `error` and no times.
    """

    clock: Clock = "attention"
    method: str
    tokens: int
    layer: str
    dtype: str
    full_kernel: str = ""
    path: str = ""
    repeats: int = 0
    full_seconds: float | None = None
    seconds: float | None = None
    full_attention_seconds: float | None = None
    attention_seconds: float | None = None
    full_peak_bytes: int | None = None
    peak_bytes: int | None = None
    pairs_kept: float | None = None
    largest_group: float | None = None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster than full attention."""
        return self.full_seconds / self.seconds if self.full_seconds and self.seconds else None

    @property
    def attention_ratio(self) -> float | None:
        """The same of the attention layers alone."""
        own, full = self.attention_seconds, self.full_attention_seconds
        return full / own if own and full else None
