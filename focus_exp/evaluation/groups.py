"""What a router's groups are made of: word classes, other seeds, an untrained router and chance beside them."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.registry import build
from focus_exp.config import Config
from focus_exp.config_attention import DualConfig, FocusConfig
from focus_exp.data import Blocks
from focus_exp.errors import UserError
from focus_exp.evaluation.groups_metrics import agreement, fit, shuffled, standing_out
from focus_exp.evaluation.groups_observe import Grouping, Observed, observe, read_observed, write_observed
from focus_exp.evaluation.groups_pairs import describe_cut, write_passage
from focus_exp.evaluation.groups_passage import cut_passage
from focus_exp.evaluation.groups_words import CLASSES, TAGGER, read_passage, shown
from focus_exp.evaluation.statistics import window_means, window_sums
from focus_exp.models.adapter import adapter_name, load_adapter, read_description
from focus_exp.models.attach import detach
from focus_exp.models.methods import attached_methods, disable_method, get_attachment, set_routing, swap_methods
from focus_exp.records.groups import ClassCost, GroupFit, GroupLayer, GroupReport, TokenGroup
from focus_exp.results.intervals import estimate
from focus_exp.results.losses import Losses
from focus_exp.training.focus_dual_fit.fit import rebalance
from focus_exp.training.precision import Precision
from focus_exp.training.warm_start import calibrate

TOP_TOKENS = 12
STANDARD = ("mean", "scale")  # of the tokens, by which two encoders see them


@dataclass
class GroupAnalysis:
    """Measures a trained router with hard groups. What a router does to the windows is kept in `folder`, so that an
    interrupted run goes on with the next router.

    blocks: held-out text; calibration: training text, on which an untrained router is balanced as a trained one is.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: Blocks
    calibration: list[Tensor]
    config: Config
    precision: Precision
    folder: Path

    def __post_init__(self) -> None:
        settings, length = self.config.analyze, self.blocks.seq_len
        self.indices = self.blocks.spread(-(-settings.tokens // length))
        # the first token of a window is not scored
        self.scored = Losses([(*place, length - 1) for place in self.blocks.places(self.indices)])
        self.windows: list[Tensor] = [self.blocks[i]["input_ids"] for i in self.indices]
        read = [read_passage(self.tokenizer, window.tolist()) for window in self.windows]
        # what a tokenizer puts before every window is no part of the text
        self.text = slice(0 if self.blocks.bos is None else 1, None)
        self.tokens = np.array([shown(piece) for passage in read for piece in passage.pieces[self.text]])
        self.classes = np.array([[CLASSES.index(kind) for kind in passage.classes] for passage in read])
        self.labels = self.flat(self.classes)
        self.everywhere = Counter(self.tokens.tolist())

    def flat(self, values: np.ndarray) -> np.ndarray:
        """`[windows, T]` as `[N]`, the text alone."""
        return values[:, self.text].ravel()

    def report(self) -> GroupReport:
        """Everything, and the passage for the page into `folder`."""
        settings = self.config.analyze
        self.use_hard_groups()
        trained = self.kept("trained", partial(self.observe, "trained router"))
        if not trained.groupings:
            chosen = get_attachment(self.model).options["groups_per_layer"]
            raise UserError(f"attention.groups_per_layer must leave a layer with groups (got {chosen}).")
        base = self.kept("base", self.observe_base)
        middle = len(self.indices) // 2
        item = self.blocks[self.indices[middle]]
        passage = self.windows[middle][: settings.passage_tokens]
        cut = cut_passage(self.model, passage, self.precision)
        read = read_passage(self.tokenizer, passage.tolist())
        untrained = self.kept("untrained", self.observe_untrained)
        others = [self.kept(f"other-{n}", partial(self.observe_other, f)) for n, f in enumerate(settings.others)]
        write_passage(self.folder / "passage.json", cut, read)
        shares = np.bincount(self.labels, minlength=len(CLASSES)) / len(self.labels)
        report = GroupReport(
            tokens=len(self.labels),
            windows=len(self.windows),
            passage_tokens=len(passage),
            passage_from=self.blocks.stream.documents[int(item["document_ids"][0])],
            tagger=TAGGER,
            class_shares={name: float(share) for name, share in zip(CLASSES, shares, strict=True) if share},
            others=[adapter_name(folder) for folder in settings.others],
            layers=[self.layer(grouping, trained, untrained, others) for grouping in trained.groupings],
            costs=self.costs(base.nll, trained.nll),
        )
        describe_cut(report, cut, read, settings.pairs)
        return report

    def kept(self, name: str, measure: Callable[[], Observed]) -> Observed:
        """What an interrupted run measured before, or what is measured now."""
        path = self.folder / f"{name}.npz"
        observed = read_observed(path)
        if observed is None:
            observed = measure()
            write_observed(path, observed)
        print(f"observed: {name:<12} {observed.nll.size:,} tokens, {np.nanmean(observed.nll):.4f} nats per token")
        return observed

    def use_hard_groups(self) -> None:
        attention = self.config.attention
        pair_rule = attention.pair_rule if isinstance(attention, FocusConfig) else None
        set_routing(self.model, hard=True, top_k=self.groups.top_k, pair_rule=pair_rule)

    @property
    def groups(self) -> FocusConfig | DualConfig:
        return self.config.dual or self.config.focus

    def observe(self, label: str) -> Observed:
        return observe(self.model, self.windows, self.precision, label)

    def observe_base(self) -> Observed:
        with disable_method(self.model):
            return self.observe("full attention")

    def observe_untrained(self) -> Observed:
        """A router as it is before training, of another seed than the trained one's, balanced on the same text."""
        attachment = get_attachment(self.model)
        torch.manual_seed(self.config.seed + 1)
        fresh: dict[int, AttentionMethod] = {}
        for index, method in attached_methods(self.model).items():
            fresh[index] = build(attachment.method, method.shape, **attachment.options).eval()
            # what tells the tokens apart is not a part of the router
            fresh[index].load_state_dict({k: v for k, v in method.state_dict().items() if k in STANDARD}, strict=False)
        with swap_methods(self.model, fresh):
            (rebalance if self.config.dual else calibrate)(self.model, self.calibration, self.precision)
            set_routing(self.model, hard=True)
            return self.observe("untrained router")

    def observe_other(self, folder: str) -> Observed:
        """The router in another adapter, which stays attached."""
        own = get_attachment(self.model).method
        if (method := read_description(folder)["method"]) != own:
            raise UserError(f"analyze.others holds {folder}, whose method is {method}, not {own}; leave it out")
        detach(self.model)
        load_adapter(self.model, folder, check_base=self.config.check_base)
        self.use_hard_groups()
        return self.observe(adapter_name(folder))

    def layer(self, own: Grouping, trained: Observed, untrained: Observed, others: list[Observed]) -> GroupLayer:
        groups, confidence = self.flat(trained.groups_of(own)), self.flat(trained.confidence_of(own))
        other_seeds = [self.flat(other.groups_of(own)) for other in others if own in other.groupings]
        random, chance = self.flat(untrained.groups_of(own)), shuffled(groups, self.config.seed)
        return GroupLayer(
            layer=own.layer,
            head=own.head,
            confidence=float(confidence.mean()),
            groups=[self.group(number, groups == number, confidence) for number in range(self.groups.groups)],
            fits=[
                GroupFit(router="trained", **vars(fit(groups, self.labels))),
                GroupFit(router="untrained", **vars(fit(random, self.labels))),
                GroupFit(router="chance", **vars(fit(chance, self.labels))),
            ],
            agreement=[agreement(groups, other) for other in other_seeds],
            agreement_untrained=agreement(groups, random),
            agreement_chance=agreement(groups, chance),
        )

    def group(self, number: int, members: np.ndarray, confidence: np.ndarray) -> TokenGroup:
        group = TokenGroup(name=letter(number), share=float(members.mean()))
        if members.any():
            counts = np.bincount(self.labels[members], minlength=len(CLASSES))
            most = int(counts.argmax())
            group.confidence = float(confidence[members].mean())
            group.word_class, group.purity = CLASSES[most], float(counts[most] / counts.sum())
            group.class_share = float((self.labels == most).mean())
            group.tokens = standing_out(Counter(self.tokens[members].tolist()), self.everywhere, TOP_TOKENS)
        return group

    def costs(self, full: np.ndarray, hard: np.ndarray) -> list[ClassCost]:
        """By class of the token that is predicted, all classes first; of those that every window has."""
        # only from there on has a query anything to lose
        beyond = np.arange(full.shape[1]) > self.groups.window + self.groups.sinks
        rows = []
        for number, name in [(None, "all"), *enumerate(CLASSES)]:
            of_class = beyond & ((self.classes == number) if number is not None else True)
            nll_full, nll_hard = (np.where(of_class, nll, np.nan) for nll in (full, hard))
            sums, counts = window_sums(nll_full)
            if not counts.all():
                continue
            found = estimate(window_means(nll_hard) - window_means(nll_full), counts, self.scored.documents)
            low, high = found.bounds
            nll = float(sums.sum() / counts.sum())
            rows.append(
                ClassCost(
                    word_class=name, tokens=int(counts.sum()), nll_full=nll, nll_hard=nll + found.value,
                    delta=found.value, delta_low=low, delta_high=high,
                )
            )  # fmt: skip
        return rows


def letter(number: int) -> str:
    """A to Z, then A1 and so on: groups have no order, and a number would suggest one."""
    return string.ascii_uppercase[number % 26] + (str(number // 26) if number >= 26 else "")
