"""The groups that a router gives to the tokens of some windows, and what each token costs then."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence, fold_heads
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.methods import observe_selections
from focus_exp.progress import ProgressBar
from focus_exp.storage import replace_file
from focus_exp.training.precision import Precision

SHARED = -1  # in a file, in place of a head


class Grouping(NamedTuple):
    """Whose groups: of a layer, or of one of its key/value heads where those have groups of their own."""

    layer: int
    head: int | None = None


def groupings(layer: int, selection: Selection) -> dict[Grouping, Selection]:
    """What was selected for one text, by whose groups they are; nothing where no pair depends on groups."""
    if selection.assignment is None:
        return {}
    rows, _, heads = fold_heads(selection, Sequence.plain(1, selection.assignment.shape[-2]))
    if heads == 1:
        return {Grouping(layer): rows}
    return {Grouping(layer, head): row(rows, head) for head in range(heads)}


def row(selection: Selection, index: int) -> Selection:
    """One row of the batch."""
    tensors: dict[str, Any] = {
        name: x[index : index + 1] for name, x in vars(selection).items() if isinstance(x, Tensor)
    }
    return replace(selection, **tensors)


@dataclass
class Observed:
    """groups: int16 `[groupings, windows, T]`, each token's first group, as a key where that is another than as a
    query; confidence: float32, the largest entry of its assignment; nll: float32 `[windows, T]` in nats, NaN for the
    first token of a window.

    Of the base there are no groupings.
    """

    groups: np.ndarray
    confidence: np.ndarray
    nll: np.ndarray
    groupings: list[Grouping]

    def groups_of(self, grouping: Grouping) -> np.ndarray:
        return self.groups[self.groupings.index(grouping)]

    def confidence_of(self, grouping: Grouping) -> np.ndarray:
        return self.confidence[self.groupings.index(grouping)]


@torch.no_grad()
def observe(model: PreTrainedModel, windows: list[Tensor], precision: Precision, label: str) -> Observed:
    """Pass `windows`, each `[T]`, through the model as it is now."""
    found: dict[Grouping, list[Tensor]] = {}
    losses = []

    def note(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        for grouping, own in groupings(layer, selection).items():
            found.setdefault(grouping, []).append(torch.stack(own.effective_key_assignment[0].max(-1)[::-1]).cpu())

    with precision.context(), observe_selections(model, note):
        for tokens in ProgressBar(windows, desc=f"{label:<28}", unit="window"):
            losses.append(token_losses(model, tokens[None].to(model.device))[0].cpu())
    nll = torch.stack(losses).numpy()
    nll[:, 0] = np.nan
    parts = torch.stack([torch.stack(of_one) for of_one in found.values()]) if found else torch.zeros(0, 0, 2, 0)
    return Observed(parts[:, :, 0].to(torch.int16).numpy(), parts[:, :, 1].float().numpy(), nll, list(found))


def write_observed(path: Path, found: Observed) -> None:
    content = io.BytesIO()
    places = [(layer, SHARED if head is None else head) for layer, head in found.groupings]
    np.savez_compressed(content, **vars(found) | {"groupings": np.array(places, dtype=np.int64).reshape(-1, 2)})
    replace_file(path, content.getvalue())


def read_observed(path: Path) -> Observed | None:
    """What `write_observed` wrote; None where there is nothing whole."""
    try:
        with np.load(path, allow_pickle=False) as data:
            places = [Grouping(layer, None if head == SHARED else head) for layer, head in data["groupings"].tolist()]
            return Observed(data["groups"], data["confidence"], data["nll"], places)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
