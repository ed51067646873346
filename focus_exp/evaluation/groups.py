"""Describe a router's groups by word classes, other seeds and chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import xlogy
from sklearn.metrics import adjusted_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.registry import build
from focus_exp.attention.selection import Selection, Sequence, base_mask_or_self, fold_heads, group_mask, local_mask
from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.errors import UserError
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.evaluation.words import CLASSES, TAGGER, read_passage, split_pieces
from focus_exp.fitting.balance import balance_groups
from focus_exp.models.adapter import adapter_name, load_adapter, read_description
from focus_exp.models.attach import detach
from focus_exp.models.head import Head
from focus_exp.models.methods import (
    attached_methods,
    disable_method,
    get_attachment,
    observe_selections,
    set_routing,
    swap_methods,
)
from focus_exp.progress import ProgressBar
from focus_exp.results.intervals import estimate
from focus_exp.results.losses import Losses
from focus_exp.results.measurement import Measurement
from focus_exp.training.precision import Precision

HARD = "focus_hard"  # variant
STANDARDIZATION = ("mean", "scale")  # of the tokens, as two encoders see them
DISTINCTIVE = 12  # tokens of a group that are listed


class Grouping(NamedTuple):
    """A layer, or one of its key/value heads with groups of its own."""

    layer: int
    head: int | None = None


def split_heads(layer: int, selection: Selection) -> dict[Grouping, Selection]:
    """Return the selection of one sequence for each grouping; {} without groups."""
    if selection.assignment is None:
        return {}
    rows, _, heads = fold_heads(selection, Sequence.plain(1, selection.assignment.shape[-2]))
    if heads == 1:
        return {Grouping(layer): rows}

    def take(head: int) -> Selection:
        tensors: dict[str, Any] = {n: x[head : head + 1] for n, x in vars(rows).items() if isinstance(x, Tensor)}
        return replace(rows, **tensors)

    return {Grouping(layer, head): take(head) for head in range(heads)}


@dataclass
class RoutedText:
    """Routing of sequences by one router; arrays are (sequences, T).

    groups: each token's first group as a key. confidence: the largest entry of its assignment. nll: in nats, NaN for
    the first token. The base has no groups.
    """

    groups: dict[Grouping, np.ndarray]
    confidence: dict[Grouping, np.ndarray]
    nll: np.ndarray


@dataclass
class GroupAnalysis:
    """Describe a router's groups under hard routing.

    Args:
        blocks: held-out text.
        calibration: training text, on which an untrained router is balanced as a trained one is.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: SequenceDataset
    calibration: list[Tensor]
    config: Config
    precision: Precision

    def __post_init__(self) -> None:
        length = self.blocks.seq_len
        self.indices = self.blocks.select_evenly(-(-self.config.analyze.tokens // length))
        scored = length - self.blocks.unscored
        self.scored = Losses([(*place, scored) for place in self.blocks.locate(self.indices)])
        self.sequences: list[Tensor] = [self.blocks[i]["input_ids"] for i in self.indices]
        self.passages = [read_passage(self.tokenizer, tokens.tolist()) for tokens in self.sequences]
        # what a tokenizer puts before every sequence is not part of the text
        self.text = slice(len(self.blocks.prefix), None)
        self.classes = np.array([[CLASSES.index(kind) for kind in passage.classes] for passage in self.passages])
        self.labels = self.flatten(self.classes)
        self.ids = self.flatten(np.stack([tokens.numpy() for tokens in self.sequences]))
        self.method: Any = next(iter(attached_methods(self.model).values()))

    def flatten(self, values: np.ndarray) -> np.ndarray:
        """Return (sequences, T) as (N,), the text alone."""
        return values[:, self.text].ravel()

    def measure(self) -> list[Measurement]:
        """Measure everything."""
        settings = self.config.analyze
        self.use_hard_routing()
        trained = self.observe("trained router")
        if not trained.groups:
            budget = get_attachment(self.model).options.get("groups_per_layer")
            raise UserError(
                f"attention.groups_per_layer must leave a layer with groups (got {budget}). Raise it in one layer."
            )
        with disable_method(self.model):
            base = self.observe("full attention")
        middle = len(self.indices) // 2
        tokens = self.sequences[middle][: settings.passage_tokens]
        passage = self.describe_passage(tokens, self.passages[middle].words)
        untrained = self.observe_untrained()
        others = [self.observe_other(folder) for folder in settings.others]
        labels = {grouping: self.flatten(groups) for grouping, groups in trained.groups.items()}
        closest = max(labels, key=lambda grouping: compare_labels(labels[grouping], self.labels)["ami"])
        fractions = np.bincount(self.labels, minlength=len(CLASSES)) / len(self.labels)
        facts: dict[str, Any] = {"tokens": len(self.labels), "windows": len(self.sequences), "tagger": TAGGER}
        facts |= {"passage_tokens": len(tokens), "passage_from": self.blocks.locate(self.indices)[middle][0]}
        facts["others"] = [adapter_name(folder) for folder in settings.others]
        return [
            make_measurement("analyzed_tokens", len(self.labels), "tokens", **facts),
            *(
                make_measurement("word_class_fraction", float(fraction), variant="text", word_class=name)
                for name, fraction in zip(CLASSES, fractions, strict=True)
                if fraction
            ),
            *(m for grouping in trained.groups for m in self.describe_layer(grouping, trained, untrained, others)),
            *passage,
            self.color_passage(tokens, trained, middle, closest),
            *self.class_costs(base.nll, trained.nll),
        ]

    def use_hard_routing(self) -> None:
        set_routing(self.model, hard=True, **self.config.attention.routing)

    @torch.no_grad()
    def observe(self, label: str) -> RoutedText:
        """Run the sequences through the model as it is now."""
        groups: dict[Grouping, list[Tensor]] = {}
        confidence: dict[Grouping, list[Tensor]] = {}
        losses = []

        def store(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
            for grouping, rows in split_heads(layer, selection).items():
                largest, group = rows.effective_key_assignment[0].max(-1)
                groups.setdefault(grouping, []).append(group.cpu())
                confidence.setdefault(grouping, []).append(largest.float().cpu())

        head = Head(self.model)
        with self.precision.context(), observe_selections(self.model, store):
            for tokens in ProgressBar(self.sequences, desc=f"{label:<28}", unit="sequence"):
                losses.append(token_losses(head, tokens[None].to(self.model.device))[0].cpu())
        stacked = [{key: torch.stack(rows).numpy() for key, rows in x.items()} for x in (groups, confidence)]
        nll = torch.stack(losses).numpy()
        print(f"observed: {label:<16} {nll.size:,} tokens, {np.nanmean(nll):.4f} nats per token")
        return RoutedText(stacked[0], stacked[1], nll)

    @torch.no_grad()
    def describe_passage(self, tokens: Tensor, words: list[str]) -> list[Measurement]:
        """Return the density of each layer's distant pairs on `tokens` (T,), and kept ones of the highest affinity."""
        measured: list[Measurement] = []

        def describe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
            for grouping, rows in split_heads(layer, selection).items():
                make: Callable[..., Measurement] = partial(make_measurement, **grouping._asdict())
                distant, kept = mask_distant_pairs(method, rows, sequence)
                count = int(distant.sum())
                measured.append(make("passage_distant_density", float(kept.sum()) / count if count else None))
                assert rows.assignment is not None
                affinity = (rows.assignment @ rows.effective_key_assignment.transpose(-1, -2))[0]
                for query, key, value in best_pairs(affinity, kept, self.config.analyze.pairs):
                    pair = {"query": query, "key": key, "query_word": words[query], "key_word": words[key]}
                    measured.append(make("pair_affinity", value, "", **pair))

        with self.precision.context(), observe_selections(self.model, describe):
            self.model(input_ids=tokens[None].to(self.model.device), use_cache=False, logits_to_keep=1)
        return measured

    def observe_untrained(self) -> RoutedText:
        """Observe a fresh router of another seed, balanced on the same text."""
        attachment = get_attachment(self.model)
        torch.manual_seed(self.config.seed + 1)
        fresh: dict[int, AttentionMethod] = {}
        for index, method in attached_methods(self.model).items():
            fresh[index] = build(attachment.method, method.shape, **attachment.options).eval()
            # how tokens are standardized is not part of the router
            state = {key: value for key, value in method.state_dict().items() if key in STANDARDIZATION}
            fresh[index].load_state_dict(state, strict=False)
        with swap_methods(self.model, fresh):
            balance_groups(self.model, self.calibration, self.precision)
            set_routing(self.model, hard=True)
            return self.observe("untrained router")

    def observe_other(self, folder: str) -> RoutedText:
        """Observe the router of another adapter, which stays attached."""
        attached = get_attachment(self.model).method
        if (method := read_description(folder)["method"]) != attached:
            raise UserError(
                f"analyze.others must hold adapters of {attached} (got {method} in {folder}). Leave it out."
            )
        detach(self.model)
        load_adapter(self.model, folder, check_base=self.config.check_base)
        self.use_hard_routing()
        return self.observe(adapter_name(folder))

    def color_passage(self, tokens: Tensor, trained: RoutedText, sequence: int, grouping: Grouping) -> Measurement:
        """Return the text and the group of each of `tokens`, the first of a sequence, at one layer."""
        groups = trained.groups[grouping][sequence][: len(tokens)]
        pieces = split_pieces(self.tokenizer, tokens.tolist())
        texts: dict[str, Any] = {"token_texts": pieces, "token_groups": groups.tolist(), **grouping._asdict()}
        return make_measurement("passage_groups", len(tokens), "tokens", **texts)

    def show_token(self, token: int) -> str:
        return str(self.tokenizer.decode([token])).replace(" ", "␣").replace("\n", "\\n")

    def describe_layer(
        self, grouping: Grouping, trained: RoutedText, untrained: RoutedText, others: list[RoutedText]
    ) -> Iterator[Measurement]:
        """Yield a layer's groups, and how they go with classes and other routers."""
        make: Callable[..., Measurement] = partial(make_measurement, **grouping._asdict())
        groups, random = (self.flatten(router.groups[grouping]) for router in (trained, untrained))
        chance = np.random.default_rng(self.config.seed).permutation(groups)  # groups of equal sizes
        yield make("layer_confidence", float(self.flatten(trained.confidence[grouping]).mean()))
        for number in range(self.method.groups):
            members = groups == number
            counts = np.bincount(self.labels[members], minlength=len(CLASSES))
            names = {"group": number, "word_class": CLASSES[int(counts.argmax())] if members.any() else ""}
            tokens = find_distinctive(self.ids, members, DISTINCTIVE)
            counted = {"token_counts": [n for _, n, _ in tokens], "token_totals": [n for _, _, n in tokens]}
            listed = counted | {"tokens": [self.show_token(token) for token, _, _ in tokens]}
            yield make("group_fraction", float(members.mean()), **names, **listed)
            if members.any():
                yield make("group_purity", float(counts.max() / counts.sum()), **names)
            for name, count in zip(CLASSES, counts.tolist(), strict=True):
                if count:
                    yield make("class_fraction", count / int(members.sum()), group=number, word_class=name)
        for router, labels in (("trained", groups), ("untrained", random), ("chance", chance)):
            for metric, value in compare_labels(labels, self.labels).items():
                yield make(metric, value, router=router)
        seeds = [self.flatten(other.groups[grouping]) for other in others if grouping in other.groups]
        compared = {f"trained_{n}": labels for n, labels in enumerate(seeds)} | {"untrained": random, "chance": chance}
        for router, labels in compared.items():
            yield make("router_agreement", float(adjusted_mutual_info_score(labels, groups)), "ami", router=router)

    def class_costs(self, full: np.ndarray, hard: np.ndarray) -> Iterator[Measurement]:
        """Yield the loss by class of the predicted token, and its paired change."""
        # a query has distant keys only from there on, and predicts the next token
        beyond = np.arange(full.shape[1]) > self.method.window + self.method.sinks + 1
        for number, name in [(None, "all"), *enumerate(CLASSES)]:
            chosen = np.broadcast_to(beyond & ((self.classes == number) if number is not None else True), full.shape)
            counts = chosen.sum(axis=1)
            if not (has := counts > 0).any():  # sequences without the class say nothing of it
                continue
            means = [np.mean(nll[has], axis=1, where=chosen[has], dtype=np.float64) for nll in (full, hard)]
            documents = [name for name, in_it in zip(self.scored.documents, has, strict=True) if in_it]
            change = estimate(means[1] - means[0], counts[has], documents)
            low, high = change.bounds
            nll = float(np.mean(full, where=chosen, dtype=np.float64))
            common: dict[str, Any] = {"unit": "nats", "n": int(counts.sum()), "settings": {"word_class": name}}
            yield Measurement(variant="base", metric="class_nll", value=nll, **common)
            yield Measurement(variant=HARD, metric="class_nll", value=nll + change.value, **common)
            common |= {"value": change.value, "low": low, "high": high, "reference": "base"}
            yield Measurement(variant=HARD, metric="class_nll_change", **common)


def find_distinctive(tokens: np.ndarray, members: np.ndarray, number: int) -> list[tuple[int, int, int]]:
    """Return the tokens (N,) by which a group stands out: token, occurrences in the group, occurrences in all.

    Those that the group has more often than its size lets expect, by the log-likelihood ratio (Dunning, 1993).
    """
    values, index = np.unique(tokens, return_inverse=True)
    totals, inside = np.bincount(index), np.bincount(index[members], minlength=len(values))
    expected = totals * members.mean()
    ratios = xlogy(inside, inside / np.maximum(expected, 1e-12))
    ratios += xlogy(totals - inside, (totals - inside) / np.maximum(totals - expected, 1e-12))
    ratios[inside <= expected] = 0.0
    best = [i for i in np.argsort(-ratios, kind="stable")[:number] if ratios[i] > 0]
    return [(int(values[i]), int(inside[i]), int(totals[i])) for i in best]


def compare_labels(groups: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return how well groups (N,) go with labels (N,).

    purity: fraction of tokens whose label is the most frequent one of their group. ami: mutual information over the
    mean of both entropies, adjusted for chance: 0 in expectation there.
    """
    return {
        "purity": float(contingency_matrix(labels, groups).max(0).sum() / len(groups)),
        "ami": float(adjusted_mutual_info_score(labels, groups)),
    }


def mask_distant_pairs(method: AttentionMethod, selection: Selection, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Return the pairs (T, T) of one sequence beyond window and sinks, and those of them that hard routing keeps."""
    length = sequence.start.shape[1]
    rows = slice(0, length)
    visible = base_mask_or_self(sequence, rows, length)[0]
    distant = visible & ~local_mask(sequence, rows, length, method.window, method.sinks)[0]
    return distant, distant & group_mask(selection, rows, length)[0]


def best_pairs(affinity: Tensor, kept: Tensor, number: int) -> list[tuple[int, int, float]]:
    """Return the queries with the highest affinity (T, T) to a kept key, that key and the affinity; no key twice."""
    values, keys = affinity.masked_fill(~kept, -1.0).max(-1)
    best: dict[int, tuple[int, int, float]] = {}  # by key
    for query in values.sort(descending=True, stable=True).indices.tolist():
        if len(best) == number or values[query] <= 0:
            break
        key = int(keys[query])
        best.setdefault(key, (query, key, float(values[query])))
    return [*best.values()]


def make_measurement(
    metric: str, value: float | None, unit: str = "fraction", variant: str = "router", **settings: Any
) -> Measurement:
    return Measurement(variant=variant, metric=metric, value=value, unit=unit, settings=settings)
