"""Perplexity of every variant on the same held-out sequences, with exact losses per token."""

from __future__ import annotations

import hashlib
import logging
import math
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence, count_pairs, group_sizes
from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.errors import UserError, first_line
from focus_exp.evaluation.controls import (
    BASE,
    COUNTERPART,
    RANDOM_GROUPS,
    SOFT,
    WINDOW_ONLY,
    hard_name,
    random_groups,
    slug,
    trained_name,
    window_only,
)
from focus_exp.evaluation.statistics import mean_by_position, sequence_sums, token_mean
from focus_exp.models.adapter import adapter_name, build_adapter_methods, read_description
from focus_exp.models.methods import (
    active_methods,
    disable_method,
    is_causal,
    observe_selections,
    set_routing,
    swap_methods,
    use_causal_assignment,
)
from focus_exp.progress import ProgressBar
from focus_exp.records.rows import Kind, Row
from focus_exp.results.losses import Losses
from focus_exp.storage import atomic_write
from focus_exp.training.precision import Precision

log = logging.getLogger(__name__)

LOGIT_ROWS = 32  # positions whose logits are float32 at a time: with 50,000 tokens they stay in a CPU's cache
FIRST_ROUND = 4  # sequences
KINDS = get_args(Kind)


@dataclass
class PairCounter:
    """Count the causal query-key pairs that the attached layers keep, forward pass by forward pass.

    With a stride below the sequence length, tokens that are only context count too.

    counts: per layer and forward pass [total, distant, kept distant]; distant pairs lie beyond window and sinks.
    group_tokens: per layer and forward pass the tokens in each group (heads, K).
    """

    counts: dict[int, list[np.ndarray]] = field(default_factory=dict)
    group_tokens: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def observe(self, layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        """Count one layer's pairs; an observer for `observe_selections`."""
        pairs = method.count_pairs(selection, sequence)
        self.counts.setdefault(layer, []).append(np.array([pairs.total, pairs.distant, pairs.distant_kept]))
        if selection.key_groups is not None:
            self.group_tokens.setdefault(layer, []).append(group_sizes(selection, sequence).cpu().numpy())

    @property
    def by_layer(self) -> list[np.ndarray]:
        """Return [total, distant, kept distant] of each attached layer."""
        return [np.sum(counts, axis=0) for _, counts in sorted(self.counts.items())]

    @property
    def totals(self) -> tuple[int, int, int]:
        """Return total, distant and kept distant pairs, summed over layers."""
        total, distant, kept = np.sum(self.by_layer, axis=0).tolist() if self.counts else (0, 0, 0)
        return total, distant, kept

    @property
    def distant_density(self) -> float:
        """Return the fraction of the distant pairs that is kept."""
        _, distant, kept = self.totals
        return kept / distant if distant else 1.0

    @property
    def sparsity(self) -> float:
        """Return the fraction of all causal pairs that is pruned."""
        total, distant, kept = self.totals
        return (distant - kept) / total if total else 0.0

    @property
    def group_fractions(self) -> list[list[float]]:
        """Return the fraction of tokens in each group [layers][K], one entry per head with groups of its own."""
        layers = [np.sum(sizes, axis=0) for _, sizes in sorted(self.group_tokens.items())]
        return [(sizes / max(1, sizes.sum())).tolist() for layer in layers for sizes in layer]

    @property
    def largest_group(self) -> float | None:
        return max((max(fractions) for fractions in self.group_fractions), default=None)

    def map(self, function: Callable[[int, str, list[np.ndarray]], list[np.ndarray]]) -> PairCounter:
        """Return a counter with `function(layer, field, passes)` in place of each list of forward passes."""
        return PairCounter(
            *(
                {layer: function(layer, name, passes) for layer, passes in old.items()}
                for name, old in vars(self).items()
            )
        )


@dataclass
class Scores:
    """Losses of some batches of sequences.

    nll: (sequences, T) in nats, NaN where a token is not scored. pairs: counted on these very sequences.
    seconds: of each batch. path: kernels that computed the attention.
    """

    nll: np.ndarray
    seconds: list[float]
    pairs: PairCounter = field(default_factory=PairCounter)
    path: str = ""

    def head(self, batches: int, sequences: int) -> Scores:
        """Return the scores of the first batches."""
        pairs = self.pairs.map(lambda _, __, passes: passes[:batches])
        return Scores(self.nll[:sequences], self.seconds[:batches], pairs, self.path)

    def extend(self, new: Scores) -> Scores:
        """Return these scores followed by those of further batches."""
        pairs = new.pairs.map(lambda layer, name, passes: getattr(self.pairs, name)[layer] + passes)
        return Scores(np.concatenate([self.nll, new.nll]), self.seconds + new.seconds, pairs, new.path)


@torch.no_grad()
def score(
    model: PreTrainedModel, blocks: SequenceDataset, batches: list[list[int]], precision: Precision, label: str
) -> Scores:
    """Score batches of sequences and count the pairs that an enabled method keeps.

    Args:
        batches: indices into `blocks`.
        label: of the progress bar.

    Raises:
        RuntimeError: a loss is not finite; NaN would pass for a token that is not scored.
    """
    pairs, losses, seconds = PairCounter(), [], []
    loader = ProgressBar(DataLoader(blocks, batch_sampler=batches), desc=f"{label:<28}", unit="batch")
    with precision.context(), observe_selections(model, pairs.observe) if active_methods(model) else nullcontext():
        for batch in loader:
            start = time.perf_counter()
            tokens = batch["input_ids"].to(model.device)
            loss = token_losses(model, tokens)
            scored = (
                torch.arange(tokens.shape[1], device=tokens.device) >= batch["scored_from"].to(tokens.device)[:, None]
            )
            if not torch.isfinite(loss[scored]).all():
                raise RuntimeError("a loss is not finite")
            losses.append(loss.masked_fill(~scored, float("nan")).cpu())
            seconds.append(time.perf_counter() - start)
    paths = sorted({m.path for m in active_methods(model).values() if m.path is not None})
    return Scores(torch.cat(losses).numpy(), seconds, pairs, ", ".join(paths))


def token_losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the float32 loss (B, T) of each token given those before it; 0 for the first, which is never scored."""
    logits = model(input_ids=tokens, use_cache=False).logits
    losses = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for begin in range(0, tokens.shape[1] - 1, LOGIT_ROWS):
        end = min(begin + LOGIT_ROWS, tokens.shape[1] - 1)
        targets = tokens[:, begin + 1 : end + 1]
        loss = F.cross_entropy(logits[:, begin:end].float().flatten(0, 1), targets.flatten(), reduction="none")
        losses[:, begin + 1 : end + 1] = loss.unflatten(0, targets.shape)
    return losses


def write_scores(path: Path, scores: Scores, batches: list[list[int]], key: str) -> None:
    """Write scores with the batches that they are of, and a key of everything else that they depend on."""
    arrays: dict[str, Any] = {
        "nll": scores.nll, "seconds": scores.seconds, "path": scores.path, "key": key,
        "indices": [i for batch in batches[: len(scores.seconds)] for i in batch],
    }  # fmt: skip
    for name, layers in vars(scores.pairs).items():
        arrays |= {f"{name}.{layer}": np.stack(passes) for layer, passes in layers.items()}
    with atomic_write(path) as new, new.open("wb") as file:  # given a name, numpy would add its own ending
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_scores(path: Path, batches: list[list[int]], key: str) -> Scores | None:
    """Read the scores of the first of `batches`; None where there are none, or of other batches or another key."""
    try:
        with np.load(path, allow_pickle=False) as data:
            seconds = data["seconds"].tolist()
            if str(data["key"]) != key or data["indices"].tolist() != [i for b in batches[: len(seconds)] for i in b]:
                return None
            pairs = PairCounter()
            for name, layers in vars(pairs).items():
                layers |= {int(k.partition(".")[2]): list(data[k]) for k in data if k.startswith(f"{name}.")}
            return Scores(data["nll"], seconds, pairs, str(data["path"]))
    # every way in which a damaged archive has been seen to fail
    except (OSError, EOFError, ValueError, KeyError, IndexError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None


@dataclass
class PerplexityEvaluator:
    """Score the rows of the perplexity table on the same sequences, kept in `folder` so that a run resumes.

    Args:
        blocks: held-out sequences.
        weights: fingerprint of the base; scores of other weights are not read.
    """

    model: PreTrainedModel
    blocks: SequenceDataset
    config: Config
    precision: Precision
    folder: Path
    weights: str = ""

    def __post_init__(self) -> None:
        recipe = self.config.recipe
        self.is_base_frozen = not (recipe.trains("lora") or recipe.trains("all"))
        self.indices = self.blocks.select_evenly(self.config.eval.max_sequences)
        size = self.config.eval.batch_size
        batches = [self.indices[begin : begin + size] for begin in range(0, len(self.indices), size)]
        bits = len(batches).bit_length()  # bit-reversed order: the first batches are spread over the documents
        order = sorted(range(len(batches)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
        self.batches = [batches[i] for i in order]
        self.count = self.round_sizes[0]  # batches in this round
        self.scores: dict[str, Scores] = {}
        self.rows: list[Row] = []
        self.phase_rows: list[Row] = []

    @property
    def round_sizes(self) -> list[int]:
        """Return the batches in each round: 4, 8, 16 sequences up to a third of them, then all."""
        sizes: list[int] = []
        total = len(self.indices)
        while self.is_base_frozen and 3 * (count := FIRST_ROUND << len(sizes)) <= total:
            sizes.append(count)
        return [*dict.fromkeys(math.ceil(count / self.config.eval.batch_size) for count in sizes), len(self.batches)]

    @property
    def losses(self) -> Losses:
        """Return the losses of this round's sequences under every variant."""
        indices = [i for batch in self.batches[: self.count] for i in batch]
        order = np.argsort(indices)
        nll = {name: s.nll[order] for name, s in self.scores.items() if len(s.nll) == len(indices)}
        sums = {name: sequence_sums(values) for name, values in nll.items()}
        counts: Any = next(iter(sums.values()))[1] if sums else []
        units = [(*place, int(n)) for place, n in zip(self.blocks.locate(sorted(indices)), counts, strict=bool(sums))]
        return Losses(units, {name: total / n for name, (total, n) in sums.items()})

    def measure_base(self) -> None:
        """Score the unmodified model, the reference of every other row."""
        self.add(Row(name=BASE, kind="base", method="full", causal=True))

    def measure_phase(self, phase: str) -> None:
        """Score soft and hard routing after a phase that others follow."""
        rows, self.rows, self.count = self.rows, [], len(self.batches)
        if self.is_base_frozen:
            self.measure_base()
        self.measure_soft(phase)
        self.measure_hard(self.config.focus.top_k, self.config.focus.pair_rule, phase)
        self.phase_rows += [row for row in self.rows if row.phase]
        self.rows = rows

    def measure_attached(self, on_round: Callable[[int, int], None] | None = None) -> None:
        """Score what is attached or trained, in rounds of 4, 8, 16, ... and all sequences.

        Args:
            on_round: called after each round with the sequences scored and their final number; the rows are then a
                valid table of that many sequences. Only controls that are matched to the hard row start again.
        """
        base = self.rows
        for count in self.round_sizes:
            self.rows, self.count = [], count
            if self.is_base_frozen:
                self.measure_base()
            else:  # measured before its weights changed
                self.rows += base
            self.measure_variants()
            if on_round:
                on_round(sum(map(len, self.batches[: self.count])), len(self.indices))

    def measure_variants(self) -> None:
        attention = self.config.attention
        if not self.is_base_frozen:
            with self.full_attention():
                name = trained_name(self.model, self.config)
                self.add(Row(name=name, kind="trained", method="full", causal=True))
        if self.config.has_router:
            self.measure_focus()
        elif attention.method != "full":
            if self.config.dual:  # an adapter may be measured at another number of groups
                set_routing(self.model, hard=True, top_k=self.config.dual.top_k)
            self.add(Row(name=attention.name, kind="control", method=attention.method, causal=is_causal(self.model)))
            self.measure_adapters()

    def full_attention(self) -> AbstractContextManager[Any]:
        is_attached = getattr(self.model, "focus_attachment", None) is not None
        return disable_method(self.model) if is_attached else nullcontext()

    def measure_focus(self) -> None:
        """Score the configured hard routing and its controls first; rows end in table order."""
        attention = self.config.focus
        configured, hard = (attention.top_k, attention.pair_rule), self.hard_routings()
        scores = self.measure_hard(*configured)
        if scores is not None and self.config.eval.controls:
            self.measure_controls(scores.pairs)
        self.measure_adapters()
        for routing in hard:
            if routing != configured:
                self.measure_hard(*routing)
        self.measure_soft()
        if not is_causal(self.model) and attention.balance_sequences:
            self.measure_causal_counterparts()
        set_routing(self.model, hard=True, top_k=attention.top_k, pair_rule=attention.pair_rule)
        places: dict[Any, int] = {routing: place for place, routing in enumerate(hard)}

        def table_order(row: Row) -> tuple[Any, ...]:
            is_wide = row.window is not None
            return KINDS.index(row.kind), places.get((row.top_k, row.pair_rule), 0), row.method != "window", is_wide

        self.rows.sort(key=table_order)

    def hard_routings(self) -> list[tuple[int, str]]:
        """Return (top_k, pair rule) of every hard row."""
        attention, wanted = self.config.focus, self.config.eval.top_k
        rules = dict.fromkeys([attention.pair_rule, *self.config.eval.pair_rules])
        top_ks = [k for k in range(1, attention.groups + 1) if not wanted or k in (*wanted, attention.top_k)]
        if skipped := sorted({*wanted} - {*top_ks}):
            log.info("eval.top_k: no row for %s with attention.groups=%d", skipped, attention.groups)
        # with one group per token all rules keep the same pairs
        return [(k, rule) for rule in rules for k in top_ks if k > 1 or rule == attention.pair_rule]

    def measure_soft(self, phase: str | None = None) -> None:
        set_routing(self.model, hard=False)
        self.add(Row(name=SOFT, kind="soft", method="focus", causal=is_causal(self.model), phase=phase))

    def measure_hard(self, top_k: int, rule: str, phase: str | None = None) -> Scores | None:
        set_routing(self.model, hard=True, top_k=top_k, pair_rule=rule)
        row = Row(
            name=hard_name(top_k, rule), kind="hard", method="focus", causal=is_causal(self.model), top_k=top_k,
            pair_rule=rule, phase=phase,
        )  # fmt: skip
        return self.add(row)

    def measure_causal_counterparts(self) -> None:
        """Score a non-causal router with groups that depend on each token alone."""
        top_k, rule = self.config.focus.top_k, self.config.focus.pair_rule
        twin = Row(name=f"{COUNTERPART}, soft", kind="twin", method="focus", causal=True)
        with use_causal_assignment(self.model):
            set_routing(self.model, hard=False)
            self.add(twin)
            set_routing(self.model, hard=True, top_k=top_k, pair_rule=rule)
            name = f"{COUNTERPART}, {hard_name(top_k, rule).removeprefix('Focus ')}"
            self.add(replace(twin, name=name, top_k=top_k, pair_rule=rule, by_position=[]))

    def measure_controls(self, pairs: PairCounter) -> None:
        """Score a density-matched window, size-matched random groups, and the window without routing."""
        attention, model = self.config.focus, self.model
        wide = density_matched_window(pairs, attention.sinks, self.layer_sequences())
        fractions = pairs.group_fractions
        window = Row(name=WINDOW_ONLY, kind="control", method="window", causal=True)
        matched = replace(window, name=f"window {wide} + sinks, density-matched", window=wide)
        random = Row(name=RANDOM_GROUPS, kind="control", method="random_groups", causal=True, top_k=attention.top_k)
        controls = [
            (matched, window_only(model, wide, attention.sinks), ""),
            (random, random_groups(model, fractions, attention, self.config.seed), repr(fractions)),
            (window, window_only(model, attention.window, attention.sinks), ""),
        ]
        for row, methods, definition in controls:
            with swap_methods(self.model, methods):
                self.add(row, definition)

    def measure_adapters(self) -> None:
        """Score adapters of other runs in place of what is attached."""
        for number, folder in enumerate(self.config.eval.adapters):
            method = read_description(folder)["method"]
            taken, long_name = {slug(row.name) for row in self.rows}, f"{method}, {adapter_name(folder)}"
            names = (method, long_name, *(f"{long_name} ({n})" for n in range(2, number + 2)))
            row = Row(name=next(n for n in names if slug(n) not in taken), kind="control", method=method, causal=True)
            try:
                methods = build_adapter_methods(self.model, folder, check_base=self.config.check_base)
            except UserError as error:  # its base was trained meanwhile
                self.rows.append(replace(row, error=first_line(error)))
                continue
            with swap_methods(self.model, methods):
                set_routing(self.model, hard=True)
                self.add(replace(row, causal=is_causal(self.model)))

    @torch.no_grad()
    def layer_sequences(self) -> list[Sequence]:
        """Return what every attached layer sees of one sequence: in sliding layers a query sees less."""
        sequences: list[Sequence] = []
        tokens = self.blocks[0]["input_ids"][None].to(self.model.device)
        with (
            self.precision.context(),
            observe_selections(self.model, lambda _, __, ___, sequence: sequences.append(sequence)),
        ):
            self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return sequences

    def add(self, row: Row, definition: str = "") -> Scores | None:
        """Append a row of this round's sequences, scoring what is not on disk; a failure becomes its error.

        Args:
            definition: what the row depends on besides its name, the configuration and the weights.
        """
        self.rows.append(row)
        path = self.folder / (f"after-{row.phase}" if row.phase else "") / f"{slug(row.name)}.npz"
        key = f"{self.precision.name} {self.weights} {hashlib.sha256(definition.encode()).hexdigest()[:12]}"
        scores = read_scores(path, self.batches, key)
        if missing := self.batches[len(scores.seconds) if scores else 0 : self.count]:
            try:
                with self.full_attention() if row.kind == "base" else nullcontext():
                    new = score(self.model, self.blocks, missing, self.precision, row.name)
            except (
                RuntimeError,
                ValueError,
                torch.OutOfMemoryError,
            ) as error:  # ValueError: a method refuses the model
                row.error = f"{type(error).__name__}: {first_line(error)}"
                log.error("%s failed: %s", row.name, row.error)
                return None
            scores = scores.extend(new) if scores else new
            write_scores(path, scores, self.batches, key)
        assert scores is not None
        self.scores[row.losses] = scores = scores.head(self.count, sum(map(len, self.batches[: self.count])))
        self.fill(row, scores)
        path_note = f", {row.path}" if row.path else ""
        log.info("measured: %s, perplexity %.3f (%.1f s%s)", row.name, row.perplexity, row.seconds, path_note)
        return scores

    def fill(self, row: Row, scores: Scores) -> None:
        """Fill in the numbers of a row, paired with the base and with the configured hard row."""
        order = np.argsort([i for batch in self.batches[: self.count] for i in batch])
        nll, window, losses = scores.nll[order], self.config.attention.window, self.losses
        low, high = losses.estimate(row.losses).bounds
        row.tokens, row.nll, row.seconds = int((~np.isnan(nll)).sum()), token_mean(nll), sum(scores.seconds)
        row.path = scores.path or None
        row.perplexity, row.perplexity_low, row.perplexity_high = map(perplexity, (row.nll, low, high))
        row.by_position = mean_by_position(nll, window)
        row.perplexity_inside_window = perplexity(token_mean(nll[:, :window]))
        row.perplexity_beyond_window = perplexity(token_mean(nll[:, window:]))
        if BASE in losses.nll:
            change = losses.difference(row.losses, losses, BASE)
            row.delta_nll, (row.delta_low, row.delta_high) = change.value, change.bounds
        hard = hard_name(self.config.focus.top_k, self.config.focus.pair_rule) if self.config.has_router else ""
        reference = SOFT if row.kind == "twin" and row.top_k is None else hard
        if row.kind in ("control", "twin") and reference in losses.nll:
            change = losses.difference(row.losses, losses, reference)
            row.delta_vs_hard, (row.delta_vs_hard_low, row.delta_vs_hard_high) = change.value, change.bounds
        row.distant_pairs_kept, row.pairs_removed = scores.pairs.distant_density, scores.pairs.sparsity
        if row.window is not None and hard in self.scores:
            # distant pairs lie beyond the configured window, for every row
            total, distant, _ = self.scores[hard].pairs.totals
            row.distant_pairs_kept = 1 - row.pairs_removed * total / distant if distant else row.distant_pairs_kept
        if row.method in ("focus", "focus_dual"):
            row.largest_group = scores.pairs.largest_group

    @property
    def group_fractions(self) -> list[list[float]] | None:
        """Return the fraction of tokens in each group under the configured hard routing [layers][K]."""
        if not self.config.has_router:
            return None
        scores = self.scores.get(hard_name(self.config.focus.top_k, self.config.focus.pair_rule))
        return scores.pairs.group_fractions if scores else None


def perplexity(nll: float | None) -> float | None:
    """Return exp(nll), infinity where it would overflow."""
    return None if nll is None else math.exp(nll) if nll < 700 else math.inf


def density_matched_window(pairs: PairCounter, sinks: int, layers: list[Sequence]) -> int:
    """Return the smallest window that keeps at least the density of `pairs` over `layers`, sinks included."""
    masks = {id(sequence.allowed): sequence for sequence in layers}  # layers of one kind share their mask
    times = Counter(id(sequence.allowed) for sequence in layers)

    def sparsity(width: int) -> float:
        counts = [(times[key], count_pairs(Selection(), masks[key], width, sinks)) for key in masks]
        return sum(n * c.distant for n, c in counts) / sum(n * c.total for n, c in counts)

    low, high = 0, layers[0].start.shape[1]
    while low < high:
        width = (low + high) // 2
        low, high = (low, width) if sparsity(width) <= pairs.sparsity else (width + 1, high)
    return low
