"""The rows of a record: the quality of one attention, an arm, a probe of the groups, a continuation."""

import math
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import TypedDict

# a mask that removes a smaller share of the pairs is not engaged: an equal score says nothing
ENGAGED = 0.05
# methods that weigh every pair otherwise, and remove none
WITHOUT_MASK = ("performer",)


def acted(method: str, pairs_removed: float | None) -> bool | None:
    """Whether a method's mask removed at least 5 % of the causal pairs; None where it has no mask."""
    if pairs_removed is None or method in WITHOUT_MASK:
        return None
    return pairs_removed >= ENGAGED


class PositionBin(TypedDict):
    """Mean loss of the tokens at positions start <= p < end of their window. nll: nats per token."""

    start: int
    end: int
    nll: float
    tokens: int


@dataclass(kw_only=True)
class Units:
    """The independent units of the rows' intervals by Student's t: `count` documents or windows, from `windows` scored
    windows. freedom: of a mean over them, below count - 1 where they are of different lengths.
    """

    kind: Literal["document", "window"]
    count: int
    windows: int
    freedom: float | None


Kind = Literal["base", "trained", "soft", "hard", "twin", "control"]  # in the order of a table


@dataclass(kw_only=True)
class Row:
    """One attention pattern scored on the same tokens as the base row.

    Losses are nats per token; `*_low`, `*_high` are 95 % bounds over the record's `units`. `delta_nll` is paired
    against the base, `delta_vs_hard` against the configured hard row (this row minus the hard one). Shares are
    0..1. In a comparison `arm` names the run that the row stands for, and the hard row is the first arm's answer.
    `phase` is the one after which the row was measured, where it is one of several.
    `window` [tokens] is the row's own local window, None where it is the configured one. `path` is what
    computed the attention: soft gates, the masked path, or a kernel of the sparse path. A twin is a router that reads
    the future, made causal: its `delta_vs_hard` is against the soft or hard row of that router as it was. A row that
    failed carries `error` and no numbers.
    """

    name: str
    kind: Kind
    method: str
    causal: bool
    top_k: int | None = None
    pair_rule: str | None = None
    window: int | None = None
    tokens: int | None = None
    nll: float | None = None
    perplexity: float | None = None
    perplexity_low: float | None = None
    perplexity_high: float | None = None
    delta_nll: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None
    delta_vs_hard: float | None = None
    delta_vs_hard_low: float | None = None
    delta_vs_hard_high: float | None = None
    distant_pairs_kept: float | None = None
    pairs_removed: float | None = None
    largest_group: float | None = None
    perplexity_inside_window: float | None = None
    perplexity_beyond_window: float | None = None
    path: str | None = None
    by_position: list[PositionBin] = field(default_factory=list)
    seconds: float | None = None
    error: str | None = None
    arm: str | None = None
    phase: str | None = None

    @property
    def engaged(self) -> bool | None:
        """Whether the mask removes at least 5 % of the causal pairs; None where no mask applies (base, soft gate)."""
        unmasked = self.soft or self.kind in ("base", "trained")
        return None if unmasked else acted(self.method, self.pairs_removed)

    @property
    def memberships(self) -> int:
        """How many groups a token is in: under the rule share as many as it reaches."""
        return (self.top_k or 1) if self.pair_rule == "share" else 1

    @property
    def losses(self) -> str:
        """Its name among the losses."""
        return f"{self.name}, after {self.phase}" if self.phase else self.name

    @property
    def soft(self) -> bool:
        """Whether its gates weigh every pair."""
        return self.kind == "soft" or (self.kind == "twin" and self.top_k is None)

    @property
    def scored(self) -> bool:
        """Whether the row has a finite loss."""
        return self.error is None and self.nll is not None and math.isfinite(self.nll)


@dataclass(kw_only=True)
class Try:
    """A learning rate of a run's last phase and the loss [nats per token] that it led to on validation text; None, with
    the reason, where it led to none."""

    learning_rate: float
    nll: float | None = None
    error: str | None = None


@dataclass(kw_only=True)
class Arm:
    """One run of a comparison.

    settings: the overrides in which it differs from the others; folder: its own, where its record is, of the run that
    was `started` then, "" if it left none; learning_rate: of its last phase, None where nothing was trained, and the
    best of its `tries` where there are any; base: the fingerprint of the weights it began with.
    """

    name: str
    settings: list[str]
    folder: str = ""
    status: Literal["finished", "failed", "interrupted"] = "finished"
    error: str | None = None
    trainable_parameters: int = 0
    learning_rate: float | None = None
    tries: list[Try] = field(default_factory=list)
    base: str = ""
    steps: int = 0
    tokens_seen: int = 0
    train_seconds: float | None = None
    fit_seconds: float | None = None
    commit: str | None = None
    config_hash: str = ""
    started: str = ""


@dataclass(kw_only=True)
class Difference:
    """Losses of an arm's answer minus those of another's, on the same tokens [nats per token], with its interval.

    `low`, `high` are 95 % bounds over the record's `units`. against: None is the first arm.
    """

    arm: str
    value: float
    against: str | None = None
    low: float | None = None
    high: float | None = None


@dataclass(kw_only=True)
class FitRow:
    """Fit of a layer's two encoders, measured on validation sequences; fractions are 0..1.

    reads: groups that a query of each head reads. pairs: density of distant pairs. importance: squared first-order
    change of the loss without distant pairs [nats^2]; lost: fraction of it without those of the other groups; least:
    the same with the best groups of each query, in older records.
    """

    layer: int
    reads: list[int]
    pairs: float
    lost: float
    importance: float
    least: float | None = None


@dataclass(kw_only=True)
class ProbeRow:
    """A router's groups on the same held-out tokens, after `step` steps of `phase`. Shares are 0..1.

    dominance: share of the largest group, dead_groups: those under 1 %; means over layers, `_worst` that of a layer.
    stability: share of the tokens whose group is that of the probe before, None at the first; `_renamed`: if groups may
    have changed their numbers. confidence: a token's largest probability; entropy: of its assignment [nats].
    """

    phase: str
    step: int
    dominance: float
    dominance_worst: float
    dead_groups: float
    dead_groups_worst: float
    confidence: float
    entropy: float
    stability: float | None = None
    stability_renamed: float | None = None
    arm: str | None = None


@dataclass(kw_only=True)
class Continuation:
    """What follows a prompt of held-out text under one attention, or in the book itself.

    base_nll: nats per token of the continuation under the base model with full attention, given the prompt.
    agrees: tokens from the start that are those of full attention. Times in seconds; read: keys of a layer that the
    last step read, of `prompt_tokens` + `tokens` - 1 there were, for nothing reads the last; cache_bytes: held at the
    end, in all layers.
    """

    attention: str
    prompt: int
    prompt_text: str
    text: str
    prompt_tokens: int
    tokens: int
    kind: Literal["book", "base", "hard"]
    top_k: int | None = None
    base_nll: float | None = None
    agrees: int | None = None
    seconds: float | None = None
    read: float | None = None
    cache_bytes: int | None = None
    error: str | None = None

    @property
    def read_share(self) -> float | None:
        """Of the keys there were at the last step, the share that it read."""
        return None if self.read is None else self.read / (self.prompt_tokens + self.tokens - 1)
