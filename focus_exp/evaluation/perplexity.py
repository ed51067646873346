"""Perplexity that can be compared: every token's loss in float32, then statistics over windows of the same tokens."""

from __future__ import annotations

import time
import zipfile
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence, group_sizes
from focus_exp.data import Blocks
from focus_exp.models.methods import active_methods, observe_selections
from focus_exp.progress import ProgressBar
from focus_exp.storage import atomic_write
from focus_exp.training.precision import Precision

# rows of logits made float32 at a time: of a vocabulary of 50 thousand they stay in a processor's cache
LOGIT_ROWS = 32


@dataclass
class PairShares:
    """Pairs counted in the very windows that were scored, summed over layers, and how the groups share the tokens.

    Of a stride below the window every query counts, that of tokens which are read again as context alone too.

    kept: share of the distant pairs (beyond window and sinks) that remain; removed: share of all causal pairs removed.
    groups: the share of tokens in each group `[layers][K]`; where heads have groups of their own a line for each head.
    """

    total: int = 0
    distant: int = 0
    kept_pairs: int = 0
    group_tokens: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        counts = method.count_pairs(selection, sequence)
        self.total += counts.total
        self.distant += counts.distant
        self.kept_pairs += counts.distant_kept
        if selection.key_groups is not None:
            sizes = group_sizes(selection, sequence).cpu()
            self.group_tokens[layer] = self.group_tokens.get(layer, torch.zeros_like(sizes)) + sizes

    @property
    def kept(self) -> float:
        return self.kept_pairs / self.distant if self.distant else 1.0

    @property
    def removed(self) -> float:
        return (self.distant - self.kept_pairs) / self.total if self.total else 0.0

    @property
    def groups(self) -> list[list[float]]:
        layers = [torch.atleast_2d(sizes) for _, sizes in sorted(self.group_tokens.items())]
        return [(sizes / sizes.sum()).tolist() for layer in layers for sizes in layer]


@dataclass
class Scores:
    """Losses `[windows, T]` in nats, NaN where a token is not scored, the pairs counted on the way, the paths taken."""

    nll: np.ndarray
    seconds: float
    pairs: PairShares | None = None
    path: str = ""


@torch.no_grad()
def score(
    model: PreTrainedModel, blocks: Blocks, indices: list[int], batch_size: int, precision: Precision, label: str
) -> Scores:
    """Losses of the windows `indices` of `blocks`, pairs counted if a method is attached and enabled.

    RuntimeError when a loss is not finite: a NaN would pass for a token that is not scored.
    """
    pairs = PairShares()
    subset = torch.utils.data.Subset(blocks, indices)
    losses: list[Tensor] = []
    began = time.perf_counter()
    attached = getattr(model, "focus_attachment", None) is not None
    batches = ProgressBar(DataLoader(subset, batch_size), desc=f"{label:<28}", unit="batch")
    with precision.context(), observing(model, pairs.observe if attached else None):
        for batch in batches:
            tokens = batch["input_ids"].to(model.device)
            loss = token_losses(model, tokens)
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            scored = positions >= batch["scored_from"].to(tokens.device)[:, None]
            if not torch.isfinite(loss[scored]).all():
                raise RuntimeError("a loss is not finite")
            losses.append(loss.masked_fill(~scored, float("nan")).cpu())
    paths = sorted({m.path for m in active_methods(model).values() if m.path is not None})
    return Scores(
        torch.cat(losses).numpy(), time.perf_counter() - began, pairs if pairs.total else None, ", ".join(paths)
    )


def token_losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Float32 loss `[B, T]` of every token given those before it; the first of a window is 0 and never scored."""
    logits = model(input_ids=tokens, use_cache=False).logits
    losses = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for begin in range(0, tokens.shape[1] - 1, LOGIT_ROWS):
        end = min(begin + LOGIT_ROWS, tokens.shape[1] - 1)
        predicted, following = logits[:, begin:end].float(), tokens[:, begin + 1 : end + 1]
        part = F.cross_entropy(predicted.flatten(0, 1), following.flatten(), reduction="none")
        losses[:, begin + 1 : end + 1] = part.unflatten(0, following.shape)
    return losses


def observing(model: PreTrainedModel, observer: Any) -> AbstractContextManager[None]:
    return nullcontext() if observer is None else observe_selections(model, observer)


def write_scores(path: Path, scores: Scores, windows: list[int], precision: Precision, weights: str) -> None:
    """Losses and pair counts of one row, of which windows and weights they are (a fingerprint), in what precision."""
    pairs = scores.pairs
    counts = (pairs.total, pairs.distant, pairs.kept_pairs) if pairs else ()
    sizes = {f"groups_{i}": t.numpy() for i, t in pairs.group_tokens.items()} if pairs else {}
    arrays = {
        "nll": scores.nll, "seconds": np.array(scores.seconds), "counts": np.array(counts, dtype=np.int64),
        "path": np.array(scores.path), "windows": np.array(windows),
        "precision": np.array(precision.name), "weights": np.array(weights),
    }  # fmt: skip
    with atomic_write(path) as new, new.open("wb") as file:  # given a name, numpy would add its own ending
        np.savez_compressed(file, allow_pickle=False, **arrays, **sizes)


def read_scores(path: Path, windows: list[int], precision: Precision, weights: str) -> Scores | None:
    """What `write_scores` wrote; None where there is nothing whole, or of other windows, precision or weights."""
    try:
        with np.load(path, allow_pickle=False) as data:
            made = data["windows"].tolist(), str(data["precision"]), str(data["weights"])
            if made != (windows, precision.name, weights):
                return None
            counts = data["counts"].tolist()
            groups = {
                int(k.removeprefix("groups_")): torch.from_numpy(data[k]) for k in data if k.startswith("groups_")
            }
            pairs = PairShares(counts[0], counts[1], counts[2], groups) if counts else None
            return Scores(data["nll"], float(data["seconds"]), pairs, str(data["path"]))
    # every way in which a damaged archive has been seen to fail
    except (OSError, EOFError, ValueError, KeyError, IndexError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None
