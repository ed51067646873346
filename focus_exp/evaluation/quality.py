"""The rows of the quality table: base, soft, hard at every k, and the controls, all on the same windows."""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from focus_exp.attention.selection import Selection, Sequence, count_pairs
from focus_exp.config import Config
from focus_exp.data import Blocks
from focus_exp.errors import UserError, first_line
from focus_exp.evaluation.controls import (
    BASE,
    RANDOM_GROUPS,
    SOFT,
    WINDOW_ONLY,
    hard_name,
    random_groups,
    window_only,
)
from focus_exp.evaluation.outcomes import slug
from focus_exp.evaluation.perplexity import PairShares, Scores, read_scores, score, write_scores
from focus_exp.evaluation.statistics import by_position, mean, window_means, window_sums
from focus_exp.models.adapter import adapter_name, build_adapter_methods, read_description
from focus_exp.models.lora import describe_lora
from focus_exp.models.methods import (
    disable_method,
    is_causal,
    observe_selections,
    set_routing,
    swap_methods,
    use_causal_assignment,
)
from focus_exp.records.rows import Kind, Row
from focus_exp.results.losses import Losses
from focus_exp.training.precision import Precision

log = logging.getLogger(__name__)

KINDS = get_args(Kind)


@dataclass
class Quality:
    """Scores rows one by one; each is kept in `folder`, so that an interrupted evaluation goes on where it stopped.

    weights: the fingerprint of the base, without which another one's scores would be taken for its own.
    """

    model: PreTrainedModel
    blocks: Blocks
    config: Config
    precision: Precision
    folder: Path
    weights: str = ""

    def __post_init__(self) -> None:
        self.indices = self.blocks.spread(self.config.eval.max_sequences)
        self.losses: Losses | None = None
        self.rows: list[Row] = []
        self.between: list[Row] = []
        self.base: str | None = None
        self.soft: str | None = None
        self.hard: str | None = None
        self.group_shares: list[list[float]] | None = None
        self.distant_share = 0.0

    def measure_base(self) -> None:
        """The row every other one is compared with: nothing attached, or all of it switched off."""
        self.add(Row(name=BASE, kind="base", method="full", causal=True))

    def measure_between(self, phase: str) -> None:
        """Soft gates and the configured hard groups, after a phase that others follow."""
        own = replace(self, folder=self.folder / f"after-{phase}")
        own.base, own.losses = self.base, self.losses
        own.measure_soft(phase)
        own.measure_hard(self.config.focus.top_k, self.config.focus.pair_rule, phase)
        self.between += own.rows

    def measure_attached(self) -> None:
        """Rows of what is attached, by its kind."""
        attention, recipe = self.config.attention, self.config.recipe
        if recipe.trains("lora") or recipe.trains("all"):
            lora = f"{describe_lora(self.model)['name']}, trained" if recipe.trains("lora") else None
            with self.full_attention():
                name = lora or "full attention, trained weights"
                self.add(Row(name=name, kind="trained", method="full", causal=True))
        if self.config.has_router:
            self.measure_focus()
        elif attention.method != "full":
            if self.config.dual:  # an adapter may be measured at another number of groups
                set_routing(self.model, hard=True, top_k=self.config.dual.top_k)
            self.add(Row(name=attention.name, kind="control", method=attention.method, causal=is_causal(self.model)))
            self.measure_adapters()

    def full_attention(self) -> AbstractContextManager[Any]:
        attached = getattr(self.model, "focus_attachment", None) is not None
        return disable_method(self.model) if attached else nullcontext()

    def measure_focus(self) -> None:
        """The configured groups and their controls come first: they answer what a run asks. Rows end in table order."""
        attention, own = self.config.focus, (self.config.focus.top_k, self.config.focus.pair_rule)
        hard = self.hard_groups()
        scores = self.measure_hard(*own)
        if scores is not None and scores.pairs is not None:
            self.hard, self.group_shares = self.rows[-1].losses, scores.pairs.groups
            if self.config.eval.controls:
                self.measure_controls(scores.pairs)
        self.measure_adapters()
        for groups in (groups for groups in hard if groups != own):
            self.measure_hard(*groups)
        self.soft = self.rows[-1].losses if self.measure_soft() else None
        if not is_causal(self.model) and attention.balance_sequences:
            self.measure_twins()
        set_routing(self.model, hard=True, top_k=attention.top_k, pair_rule=attention.pair_rule)
        places: dict[tuple[int | None, str | None], int] = {groups: place for place, groups in enumerate(hard)}
        self.rows.sort(key=lambda row: (KINDS.index(row.kind), places.get((row.top_k, row.pair_rule), 0)))

    def hard_groups(self) -> list[tuple[int, str]]:
        """The numbers of groups that a query reaches, each with its rule of pairs, in the rows of hard groups."""
        attention, asked = self.config.focus, self.config.eval.top_k
        rules = dict.fromkeys([attention.pair_rule, *self.config.eval.pair_rules])
        reached = [k for k in range(1, attention.groups + 1) if not asked or k in (*asked, attention.top_k)]
        if left := sorted({*asked} - {*reached}):
            print(f"eval.top_k: no row for {', '.join(map(str, left))}, for attention.groups={attention.groups}")
        # with one group a token both rules are the same
        return [(k, rule) for rule in rules for k in reached if k > 1 or rule == attention.pair_rule]

    def measure_soft(self, phase: str | None = None) -> Scores | None:
        set_routing(self.model, hard=False)
        causal = is_causal(self.model)
        return self.add(Row(name=SOFT, kind="soft", method="focus", causal=causal, phase=phase))

    def measure_hard(self, k: int, rule: str, phase: str | None = None) -> Scores | None:
        set_routing(self.model, hard=True, top_k=k, pair_rule=rule)
        row = Row(
            name=hard_name(k, rule), kind="hard", method="focus", causal=is_causal(self.model), top_k=k, pair_rule=rule,
            phase=phase,
        )  # fmt: skip
        return self.add(row)

    def measure_twins(self) -> None:
        """The same router where a token's groups depend on that token alone: what it gains by reading the future."""
        top_k, rule = self.config.focus.top_k, self.config.focus.pair_rule
        with use_causal_assignment(self.model):
            set_routing(self.model, hard=False)
            self.add(Row(name="same router, causal, soft", kind="twin", method="focus", causal=True))
            set_routing(self.model, hard=True, top_k=top_k, pair_rule=rule)
            name = f"same router, causal, {hard_name(top_k, rule).removeprefix('Focus ')}"
            self.add(Row(name=name, kind="twin", method="focus", causal=True, top_k=top_k, pair_rule=rule))

    def measure_controls(self, pairs: PairShares) -> None:
        """The same window without routing, a window widened to as many pairs, and random groups of the same sizes."""
        attention, model = self.config.focus, self.model
        self.distant_share = pairs.distant / pairs.total
        wide = equal_density_window(pairs, attention.sinks, self.layer_sequences())
        narrow_methods = window_only(model, attention.window, attention.sinks)
        wide_methods = window_only(model, wide, attention.sinks)
        random_methods = random_groups(model, pairs.groups, attention, self.config.seed)
        controls = [
            (control(WINDOW_ONLY, "window"), narrow_methods),
            (control(f"window {wide} + sinks, as many pairs", "window", window=wide), wide_methods),
            (control(RANDOM_GROUPS, "random_groups", top_k=attention.top_k), random_methods),
        ]
        for row, replacements in controls:
            with swap_methods(self.model, replacements):
                self.add(row)

    def measure_adapters(self) -> None:
        """What other runs left, in place of the router."""
        for folder in self.config.eval.adapters:
            method = read_description(folder)["method"]
            full, taken = f"{method}, {adapter_name(folder)}", {slug(row.name) for row in self.rows}
            names = chain((method, full), (f"{full} ({n})" for n in count(2)))
            row = control(next(name for name in names if slug(name) not in taken), method)
            try:
                methods = build_adapter_methods(self.model, folder, check_base=self.config.check_base)
            except UserError as error:  # of a base that was trained meanwhile
                self.rows.append(replace(row, error=first_line(error)))
                continue
            with swap_methods(self.model, methods):
                set_routing(self.model, hard=True)
                self.add(replace(row, causal=is_causal(self.model)))

    @torch.no_grad()
    def layer_sequences(self) -> list[Sequence]:
        """What one window looks like to every attached layer: sliding layers let a query see less."""
        sequences: list[Sequence] = []
        tokens = self.blocks[0]["input_ids"][None].to(self.model.device)
        with (
            self.precision.context(),
            observe_selections(self.model, lambda _, __, ___, sequence: sequences.append(sequence)),
        ):
            self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return sequences

    def add(self, row: Row) -> Scores | None:
        """Score one row, or read its scores if they are on disk; a row that fails stays as a row with its reason."""
        self.rows.append(row)
        path = self.folder / f"{slug(row.name)}.npz"
        scores = read_scores(path, self.indices, self.precision, self.weights)
        if scores is None:
            if row.kind == "base":
                with self.full_attention():
                    scores = self.score(row)
            else:
                scores = self.score(row)
            if scores is not None:
                write_scores(path, scores, self.indices, self.precision, self.weights)
        if scores is not None:
            self.fill(row, scores)
            by = f", {row.path}" if row.path else ""
            print(f"measured: {row.name:<40} perplexity {row.perplexity:>8.3f} ({scores.seconds:.0f} s{by})")
        return scores

    def score(self, row: Row) -> Scores | None:
        try:
            return score(self.model, self.blocks, self.indices, self.config.eval.batch_size, self.precision, row.name)
        except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:  # ValueError: a method refuses the model
            row.error = f"{type(error).__name__}: {first_line(error)}"
            log.error("%s failed: %s", row.name, row.error)
            return None

    def fill(self, row: Row, scores: Scores) -> None:
        """Numbers of a row from its losses, paired with the base's and the configured hard row's."""
        nll, window, name = scores.nll, self.config.attention.window, row.losses
        _, counts = window_sums(nll)
        if self.losses is None:
            places = self.blocks.places(self.indices)
            self.losses = Losses([(*place, int(count)) for place, count in zip(places, counts, strict=True)])
        self.losses.nll[name] = window_means(nll)
        if row.kind == "base":
            self.base = name
        low, high = self.losses.estimate(name).bounds
        row.tokens, row.nll, row.seconds = int(counts.sum()), mean(nll), scores.seconds
        row.path = scores.path or None
        assert row.nll is not None
        row.perplexity, row.perplexity_low, row.perplexity_high = perplexity(row.nll), perplexity(low), perplexity(high)
        row.by_position = by_position(nll, window)
        row.perplexity_inside_window = perplexity(mean(nll[:, :window]))
        row.perplexity_beyond_window = perplexity(mean(nll[:, window:]))
        if self.base is not None:
            row.delta_nll, row.delta_low, row.delta_high = self.difference(name, self.base)
        reference = self.soft if row.kind == "twin" and row.top_k is None else self.hard
        if reference is not None and row.kind in ("control", "twin"):
            row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high = self.difference(name, reference)
        row.distant_pairs_kept = scores.pairs.kept if scores.pairs else 1.0
        row.pairs_removed = scores.pairs.removed if scores.pairs else 0.0
        if row.window is not None and self.distant_share:
            # distant means the same for every row: beyond the configured window
            row.distant_pairs_kept = 1 - row.pairs_removed / self.distant_share
        if scores.pairs and row.method in ("focus", "focus_dual"):
            row.largest_group = max((max(shares) for shares in scores.pairs.groups), default=None)

    def difference(self, name: str, against: str) -> tuple[float, float | None, float | None]:
        assert self.losses is not None
        found = self.losses.difference(name, self.losses, against)
        return (found.value, *found.bounds)


def control(name: str, method: str, **fields: Any) -> Row:
    return Row(name=name, kind="control", method=method, causal=True, **fields)


def perplexity(nll: float | None) -> float | None:
    """exp, infinite where it would overflow."""
    return None if nll is None else math.exp(nll) if nll < 700 else math.inf


def equal_density_window(pairs: PairShares, sinks: int, layers: list[Sequence]) -> int:
    """The smallest window that keeps as large a share of all causal pairs of `layers` as `pairs` do, sinks included."""
    masks = {id(sequence.allowed): sequence for sequence in layers}  # layers of one kind share their mask
    times = Counter(id(sequence.allowed) for sequence in layers)

    def removed(width: int) -> float:
        counts = [(times[key], count_pairs(Selection(), masks[key], width, sinks)) for key in masks]
        return sum(n * c.distant for n, c in counts) / sum(n * c.total for n, c in counts)

    low, high = 0, layers[0].start.shape[1]
    while low < high:
        width = (low + high) // 2
        low, high = (low, width) if removed(width) <= pairs.removed else (width + 1, high)
    return low
