"""What is known of the groups of a run: their members, how they go with word classes, and what they cut."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class TokenGroup:
    """One group of one layer on held-out text. Shares are 0..1.

    confidence: mean of the largest entry of the assignment; word_class: the most frequent one, which is `purity` of
    the group and `class_share` of the whole text; tokens: those that set it apart.
    """

    name: str
    share: float
    confidence: float | None = None
    word_class: str = ""
    purity: float | None = None
    class_share: float | None = None
    tokens: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class GroupFit:
    """How groups go with word classes: purity and mutual information, normalised (nmi) and adjusted for chance (ami).

    router: "trained"; "untrained", drawn at random and balanced alike; "chance", groups of the trained one's sizes.
    """

    router: Literal["trained", "untrained", "chance"]
    purity: float
    nmi: float
    ami: float


@dataclass(kw_only=True)
class DistantPair:
    """A kept pair beyond window and sinks; positions in the passage, affinity g_i . g_j, mass: the base's attention
    from query to key, averaged over the heads that share the groups. `by`: the measure that put it on the list."""

    query: int
    key: int
    query_word: str
    key_word: str
    affinity: float
    mass: float
    by: Literal["affinity", "mass"]

    @property
    def distance(self) -> int:
        return self.query - self.key


@dataclass(kw_only=True)
class GroupLayer:
    """One layer, or one of its key/value heads where those have groups of their own. agreement: adjusted mutual
    information of its groups with those of other routers on the same tokens.

    Of the passage: distant_pairs_kept, the share of the pairs beyond window and sinks that share a group; and how the
    base's attention lies on it, near_mass + kept_mass + cut_mass = 1; cut_key: the key that loses most of it, with its
    share of all that is cut. affinity_median: of the kept distant pairs.
    """

    layer: int
    head: int | None = None
    confidence: float
    groups: list[TokenGroup]
    fits: list[GroupFit]
    agreement: list[float] = field(default_factory=list)
    agreement_untrained: float | None = None
    agreement_chance: float | None = None
    distant_pairs_kept: float | None = None
    near_mass: float | None = None
    kept_mass: float | None = None
    cut_mass: float | None = None
    cut_key: int | None = None
    cut_key_word: str = ""
    cut_key_share: float | None = None
    affinity_median: float | None = None
    pairs: list[DistantPair] = field(default_factory=list)

    @property
    def distant_mass_kept(self) -> float | None:
        """Of the base's attention beyond window and sinks, the share on kept pairs."""
        return distant_mass_kept([self])


@dataclass(kw_only=True)
class ClassCost:
    """Mean losses [nats] of the tokens of a class that are predicted from beyond the window, and their paired
    difference, hard groups minus full attention, with its 95 % interval."""

    word_class: str
    tokens: int
    nll_full: float
    nll_hard: float
    delta: float
    delta_low: float | None = None
    delta_high: float | None = None


@dataclass(kw_only=True)
class GroupReport:
    """The whole analysis. tokens: whose groups are described; passage_tokens: of the passage that is shown.

    class_shares: of the text; others: the routers of other seeds. cut_cost: rank correlation, over the queries of
    the passage, of the attention cut (mean of the layers) with the rise of the next token's loss.
    """

    tokens: int
    windows: int
    passage_tokens: int
    passage_from: str
    tagger: str
    class_shares: dict[str, float]
    others: list[str] = field(default_factory=list)
    layers: list[GroupLayer] = field(default_factory=list)
    costs: list[ClassCost] = field(default_factory=list)
    cut_cost: float | None = None


def distant_mass_kept(layers: list[GroupLayer]) -> float | None:
    """Over all layers, of the attention beyond window and sinks the share on kept pairs."""
    kept, cut = (sum(getattr(row, name) or 0.0 for row in layers) for name in ("kept_mass", "cut_mass"))
    return kept / (kept + cut) if kept + cut else None
