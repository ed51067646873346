"""Perplexity of every variant on the same held-out sequences."""

from __future__ import annotations

import hashlib
import logging
import math
import time
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence, count_pairs, group_sizes
from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.errors import first_line
from focus_exp.evaluation.variants import (
    BASE,
    Variant,
    attached_variants,
    hard_routing,
    slug,
    soft_routing,
    without_method,
)
from focus_exp.models.head import ROWS, Head
from focus_exp.models.methods import (
    active_methods,
    hash_methods,
    observe_selections,
)
from focus_exp.progress import ProgressBar
from focus_exp.results.losses import Losses
from focus_exp.results.measurement import Measurement, exp, hard_variant, soft_variant
from focus_exp.storage import atomic_write
from focus_exp.training.precision import Precision

log = logging.getLogger(__name__)

FIRST_ROUND = 4  # sequences


@dataclass
class PairCounter:
    """Count the causal query-key pairs that the attached layers keep.

    counts: per layer [total, distant, kept distant]; distant pairs lie beyond window and sinks.
    group_tokens: per layer the tokens in each group (heads, K).
    """

    counts: dict[int, np.ndarray] = field(default_factory=dict)
    group_tokens: dict[int, np.ndarray] = field(default_factory=dict)

    def observe(self, layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        """Count one layer's pairs; an observer for `observe_selections`."""
        pairs = method.count_pairs(selection, sequence)
        counter = PairCounter({layer: np.array([pairs.total, pairs.distant, pairs.distant_kept])})
        if selection.key_groups is not None:
            counter.group_tokens[layer] = group_sizes(selection, sequence).cpu().numpy()
        self.add(counter)

    def add(self, other: PairCounter) -> None:
        """Add the counts of other sequences."""
        for name, layers in vars(other).items():
            mine = vars(self)[name]
            mine |= {layer: mine.get(layer, 0) + values for layer, values in layers.items()}

    @property
    def totals(self) -> tuple[int, int, int]:
        """Return total, distant and kept distant pairs, summed over layers."""
        total, distant, kept = np.sum([*self.counts.values()], axis=0).tolist() if self.counts else (0, 0, 0)
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
        """Return the fraction of tokens in each group [layers][K]."""
        layers = sorted(self.group_tokens.items())
        return [(sizes / max(1, sizes.sum())).tolist() for _, heads in layers for sizes in heads]

    @property
    def largest_group(self) -> float | None:
        return max((max(fractions) for fractions in self.group_fractions), default=None)


@dataclass
class Scores:
    """Losses of sequences.

    nll: (sequences, scored tokens + 1) in nats; the first entry is of no scored token. pairs: counted on them.
    path: kernels that computed the attention.
    """

    nll: np.ndarray
    seconds: float
    pairs: PairCounter = field(default_factory=PairCounter)
    path: str = ""

    @classmethod
    def join(cls, parts: list[Scores], order: np.ndarray) -> Scores:
        """Return the scores of all sequences of `parts` in an order."""
        pairs = PairCounter()
        for part in parts:
            pairs.add(part.pairs)
        nll = np.concatenate([part.nll for part in parts])[order]
        return cls(nll, sum(part.seconds for part in parts), pairs, parts[-1].path)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    blocks: SequenceDataset,
    indices: list[int],
    batch_size: int,
    precision: Precision,
    label: str,
) -> Scores:
    """Score sequences and count the pairs that an enabled method keeps.

    Args:
        indices: of sequences in `blocks`.
        label: of the progress bar.

    Raises:
        RuntimeError: a loss is not finite; NaN would pass for a token that is not scored.
    """
    pairs, losses, head, start = PairCounter(), [], Head(model), time.perf_counter()
    loader = DataLoader(Subset(blocks, indices), batch_size)
    with precision.context(), observe_selections(model, pairs.observe) if active_methods(model) else nullcontext():
        for batch in ProgressBar(loader, desc=f"{label:<28}", unit="batch"):
            tokens = batch["input_ids"].to(model.device)
            loss = token_losses(head, tokens)
            if not torch.isfinite(loss[:, 1:]).all():
                raise RuntimeError("a loss is not finite")
            losses.append(loss[:, blocks.unscored - 1 :].cpu())
    paths = sorted({m.path for m in active_methods(model).values() if m.path is not None})
    return Scores(torch.cat(losses).numpy(), time.perf_counter() - start, pairs, ", ".join(paths))


def token_losses(head: Head, tokens: Tensor) -> Tensor:
    """Return the float32 loss (B, T) of each token; NaN for the first."""
    inputs = head.inputs(input_ids=tokens)
    losses = torch.full(tokens.shape, torch.nan, dtype=torch.float32, device=tokens.device)
    for begin in range(0, tokens.shape[1] - 1, ROWS):
        end = min(begin + ROWS, tokens.shape[1] - 1)
        targets = tokens[:, begin + 1 : end + 1]
        logits = head.logits(inputs[:, begin:end].flatten(0, 1))
        loss = F.cross_entropy(logits, targets.flatten(), reduction="none")
        losses[:, begin + 1 : end + 1] = loss.unflatten(0, targets.shape)
    return losses


def sequence_means(nll: np.ndarray) -> np.ndarray:
    """Return the mean loss of each sequence, whose first token is not scored."""
    means: np.ndarray = nll[:, 1:].astype(np.float64).mean(axis=1)
    return means


def scores_key(model: PreTrainedModel, variant: Variant, precision: Precision, weights: str) -> str:
    """Return what stored scores depend on: precision, fingerprint of the base, and tensors of the attached methods."""
    attached = "" if variant.kind == "base" else hash_methods(model)
    return f"{precision.name} {weights} {attached}".rstrip()


def write_scores(path: Path, scores: Scores, key: str) -> None:
    """Write scores with a key of what they depend on."""
    arrays: dict[str, Any] = {"nll": scores.nll, "seconds": scores.seconds, "path": scores.path, "key": key}
    for name, layers in vars(scores.pairs).items():
        arrays |= {f"{name}.{layer}": values for layer, values in layers.items()}
    with atomic_write(path) as new, new.open("wb") as file:  # given a name, numpy would add its own ending
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_scores(path: Path, key: str) -> Scores | None:
    """Read scores; None where there are none, damaged ones, or those of another key."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            data = dict(arrays)
    # every way in which a damaged archive has been seen to fail
    except (OSError, EOFError, ValueError, KeyError, IndexError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None
    if str(data.get("key")) != key:
        return None
    pairs = PairCounter()
    for name, layers in vars(pairs).items():
        layers |= {int(k.partition(".")[2]): data[k] for k in data if k.startswith(f"{name}.")}
    return Scores(data["nll"], float(data["seconds"]), pairs, str(data["path"]))


@dataclass
class PerplexityEvaluator:
    """Score every variant on the same sequences, in rounds of more and more; `folder` lets a run resume.

    rounds: sequences that each round adds. count: rounds that the scores are of.

    Args:
        blocks: held-out sequences.
        weights: fingerprint of the base; scores of other weights are not read.
        base_folder: where runs share the scores of the unmodified model; by default `folder`.
    """

    model: PreTrainedModel
    blocks: SequenceDataset
    config: Config
    precision: Precision
    folder: Path
    weights: str = ""
    base_folder: Path | None = None

    def __post_init__(self) -> None:
        self.indices = self.blocks.select_evenly(self.config.eval.max_sequences)
        self.rounds = split_rounds(self.indices, self.config.eval.batch_size)
        self.is_base_frozen = not (self.config.recipe.trains("lora") or self.config.recipe.trains("all"))
        self.count = 1 if self.is_base_frozen else len(self.rounds)
        self.scores: dict[str, Scores] = {}
        self.variants: list[Variant] = []
        self.after_phases: list[Measurement] = []
        self.has_preview = False
        attention = self.config.attention  # the variants of the configured routing, where there is a soft one
        self.soft = soft_variant(attention.method) if attention.is_soft else ""
        self.configured = hard_variant(attention.method, **attention.routing) if attention.is_soft else ""

    @property
    def scored(self) -> list[int]:
        """Return the sequences of the rounds so far, in the order of their rounds."""
        return [index for added in self.rounds[: self.count] for index in added]

    @property
    def losses(self) -> Losses:
        """Return the losses of the rounds so far under every variant."""
        units = [
            (*place, self.blocks.seq_len - self.blocks.unscored) for place in self.blocks.locate(sorted(self.scored))
        ]
        return Losses(units, {name: sequence_means(scores.nll) for name, scores in self.scores.items()})

    def measure_base(self) -> None:
        """Score the unmodified model, the reference of every other variant."""
        self.add(Variant(name=BASE, kind="base"))

    def measure_phase(self, phase: str) -> None:
        """Score soft and hard routing after a phase that others follow."""
        self.begin_round(len(self.rounds))
        before = len(self.variants)
        self.add(soft_routing(self.model, phase))
        self.add(hard_routing(self.model, self.config.attention.routing, phase))
        self.after_phases += [m for variant in self.variants[before:] for m in self.measure(variant, phase)]
        del self.variants[before:]

    def measure_attached(self, on_round: Callable[[int, int], None] | None = None) -> None:
        """Score what is attached or trained, on all sequences.

        Args:
            on_round: called with the sequences that are scored, and all, when more follow. Without it, or with a
                trained base, all are scored at once.
        """
        if on_round and self.is_base_frozen:
            for count in range(1 + self.has_preview, len(self.rounds)):
                self.begin_round(count)
                self.measure_variants()
                on_round(len(self.scored), len(self.indices))
        self.begin_round(len(self.rounds))
        self.measure_variants()

    def measure_preview(self) -> None:
        """Score the first round of a router before its training; `measure_attached` then begins with the next."""
        self.has_preview = True
        self.begin_round(1)
        self.measure_variants()

    def begin_round(self, count: int) -> None:
        """Score the sequences of the first `count` rounds from here on."""
        self.count = count
        if self.is_base_frozen:  # else measured before its weights changed
            self.variants, self.scores = [], {}
            self.measure_base()

    def measure_variants(self) -> None:
        """Score what is attached or trained, and adapters of other runs."""
        attention: Any = self.config.attention
        skipped = {*self.config.eval.top_k} - {routing.get("top_k") for routing in self.config.scored_routings}
        if attention.is_soft and skipped:
            log.info("eval.top_k: not measured: %s with attention.groups=%d", sorted(skipped), attention.groups)
        adapters = self.config.eval.adapters
        with closing(attached_variants(self.model, self.config, adapters, self.match_density)) as variants:
            for variant in variants:
                self.add(variant)

    def match_density(self) -> int:
        """Return the smallest window with at least the density of the configured routing."""
        pairs = self.scores[self.configured].pairs
        attention: Any = self.config.attention
        return density_matched_window(pairs, attention.sinks, self.layer_sequences())

    @torch.no_grad()
    def layer_sequences(self) -> list[Sequence]:
        """Return what every attached layer sees of one sequence."""
        sequences: list[Sequence] = []
        tokens = self.blocks[0]["input_ids"][None].to(self.model.device)
        with (
            self.precision.context(),
            observe_selections(self.model, lambda _, __, ___, sequence: sequences.append(sequence)),
        ):
            self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return sequences

    def add(self, variant: Variant) -> None:
        """Append a variant, scoring what is not on disk; a failure becomes its error."""
        self.variants.append(variant)
        if variant.error is not None:
            return
        key = scores_key(self.model, variant, self.precision, self.weights)
        try:
            with without_method(self.model) if variant.kind == "base" else nullcontext():
                parts = [self.load_or_score(variant, key, added) for added in self.rounds[: self.count]]
        # ValueError: a method refuses the model
        except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
            variant.error = f"{type(error).__name__}: {first_line(error)}"
            log.error("%s failed: %s", variant.name, variant.error)
            return
        self.scores[variant.key] = scores = Scores.join(parts, np.argsort(self.scored))
        variant.group_fractions = scores.pairs.group_fractions
        path_note = f", {scores.path}" if scores.path else ""
        value = exp(float(sequence_means(scores.nll).mean()))
        log.info("perplexity of %s: %.3f, scored in %.1f s%s", variant.name, value, scores.seconds, path_note)

    def load_or_score(self, variant: Variant, key: str, indices: list[int]) -> Scores:
        """Return the scores of sequences, stored with `key` in a folder named by their numbers and its definition."""
        folder = self.base_folder if variant.kind == "base" and self.base_folder else self.folder
        digest = hashlib.sha256(f"{variant.definition} {indices}".encode()).hexdigest()[:12]
        path = folder / (f"after-{variant.phase}" if variant.phase else "") / digest / f"{slug(variant.name)}.npz"
        scores = read_scores(path, key)
        if scores is None:
            size = self.config.eval.batch_size
            scores = score(self.model, self.blocks, indices, size, self.precision, variant.name)
            write_scores(path, scores, key)
        return scores

    def measurements(self) -> list[Measurement]:
        """Return the measurements of the variants, and after each phase."""
        final = [m for variant in self.variants for m in self.measure(variant)]
        if self.after_phases:
            *_, last = self.config.recipe.phases
            measured = [
                variant for variant in self.variants if variant.kind == "soft" or variant.name == self.configured
            ]
            return [*final, *self.after_phases, *(m for variant in measured for m in self.measure(variant, last))]
        return final

    def measure(self, variant: Variant, phase: str | None = None) -> Iterator[Measurement]:
        """Yield the numbers of a variant; a failed one has no values."""
        scores, losses, name = self.scores.get(variant.key), self.losses, variant.name
        count = losses.unit_count if losses.nll else None
        routing = {"top_k": variant.top_k, "pair_rule": variant.pair_rule, "window": variant.window}
        settings = variant.settings | routing | {"phase": phase, "path": scores.path or None if scores else None}
        if variant.kind not in ("base", "control"):
            phases = self.config.recipe.phases
            last = phases.get(phase or "") or next(reversed(phases.values()), None)
            settings["trainable"] = last.trainable if last else phase
        if scores is None or variant.error is not None:
            yield Measurement(variant=name, metric="perplexity", value=None, n=count, settings=settings)
            return
        density, distant_density = variant.density(scores.pairs.sparsity), scores.pairs.distant_density
        if variant.window is not None and self.configured in self.scores:
            # distant pairs lie beyond the configured window, for every variant
            total, distant, _ = self.scores[self.configured].pairs.totals
            distant_density = 1 - scores.pairs.sparsity * total / distant if distant else distant_density
        common: dict[str, Any] = {"variant": name, "density": density}
        interval = losses.estimate(variant.key)
        mean, dof = interval.value, interval.freedom
        low, high = (x if x is None else exp(x) for x in interval.bounds)
        paired = common | {"n": count, "settings": settings | {"dof": dof}}
        yield Measurement(metric="perplexity", value=exp(mean), low=low, high=high, **paired)
        yield Measurement(metric="nll", value=mean, unit="nats", n=count, settings=settings, **common)
        paired |= {"metric": "nll_change", "unit": "nats"}
        for reference in self.references(variant):
            key = f"{reference}, after {variant.phase}" if variant.phase and reference != BASE else reference
            if key in losses.nll:
                change = losses.difference(variant.key, losses, key)
                low, high = change.bounds
                yield Measurement(value=change.value, low=low, high=high, reference=reference, **paired)
        for metric, value, unit in (
            ("distant_density", distant_density, "fraction"),
            ("largest_group_fraction", variant.group_fraction(scores.pairs.largest_group), "fraction"),
            ("eval_tokens", scores.nll[:, 1:].size, "tokens"),
            ("eval_seconds", scores.seconds, "s"),
            ("training_tokens", variant.tokens, "tokens"),
            ("fit_seconds", variant.fit_seconds, "s"),
        ):
            if value is not None:
                yield Measurement(metric=metric, value=value, unit=unit, settings={"phase": phase}, **common)
        if name == self.configured and phase is None:
            for layer, fractions in zip(sorted(scores.pairs.group_tokens), scores.pairs.group_fractions, strict=False):
                for group, fraction in enumerate(fractions):
                    common = {"variant": "router", "settings": {"layer": layer, "group": group}}
                    yield Measurement(metric="group_fraction", value=fraction, unit="fraction", **common)

    def references(self, variant: Variant) -> list[str]:
        """Return the variants that a variant is compared with."""
        if variant.kind == "base":
            return []
        is_soft_counterpart = variant.kind == "causal_counterpart" and variant.top_k is None
        if variant.kind == "hard" or is_soft_counterpart:
            return [BASE, self.soft]
        return [BASE, self.configured] if variant.kind in ("control", "causal_counterpart") else [BASE]


def split_rounds(indices: list[int], batch_size: int) -> list[list[int]]:
    """Split sequences into those that each round adds, to have 4, 16, 64, ... and then all.

    A round takes whole batches, spread over the sequences: by their number with its bits reversed.
    """
    batches = [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]
    bits = len(batches).bit_length()
    order = sorted(range(len(batches)), key=lambda i: f"{i:0{bits}b}"[::-1])
    sizes = [FIRST_ROUND * 4**n for n in range(len(indices).bit_length())]  # of at most a third of all
    ends = {0, len(batches), *(math.ceil(size / batch_size) for size in sizes if 3 * size <= len(indices))}
    return [[i for n in sorted(order[begin:end]) for i in batches[n]] for begin, end in pairwise(sorted(ends))]


def density_matched_window(pairs: PairCounter, sinks: int, layers: list[Sequence]) -> int:
    """Return the smallest window that keeps at least the density of `pairs`."""

    def is_dense_enough(width: int) -> bool:
        counts = [count_pairs(Selection(), sequence, width, sinks) for sequence in layers]
        return sum(c.distant for c in counts) / sum(c.total for c in counts) <= pairs.sparsity

    return bisect_left(range(layers[0].start.shape[1]), True, key=is_dense_enough)
