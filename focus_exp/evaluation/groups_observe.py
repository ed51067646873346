"""The groups that a router gives to the tokens of some windows, and what each token costs then."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from focus_exp.attention.method import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.attached import observed
from focus_exp.storage import replace_file
from focus_exp.training.precision import Precision


@dataclass
class Observed:
    """groups: int16 `[layers, windows, T]`, each token's first group; confidence: float32, the largest entry of its
    assignment; nll: float32 `[windows, T]` in nats, NaN for the first token of a window; layers: their indices.

    Of the base there are no layers.
    """

    groups: np.ndarray
    confidence: np.ndarray
    nll: np.ndarray
    layers: list[int]

    def groups_of(self, layer: int) -> np.ndarray:
        return self.groups[self.layers.index(layer)]

    def confidence_of(self, layer: int) -> np.ndarray:
        return self.confidence[self.layers.index(layer)]


@torch.no_grad()
def observe(model: PreTrainedModel, windows: list[Tensor], precision: Precision, label: str) -> Observed:
    """Pass `windows`, each `[T]`, through the model as it is now."""
    found: dict[int, list[Tensor]] = {}
    losses = []

    def note(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        assert selection.assignment is not None
        found.setdefault(layer, []).append(torch.stack(selection.assignment[0].max(-1)[::-1]).cpu())

    with precision.context(), observed(model, note):
        for tokens in tqdm(windows, desc=f"{label:<28}", unit="window", leave=False, disable=None):
            losses.append(token_losses(model, tokens[None].to(model.device))[0].cpu())
    nll = torch.stack(losses).numpy()
    nll[:, 0] = np.nan
    layers = sorted(found)
    parts = torch.stack([torch.stack(found[layer]) for layer in layers]) if layers else torch.zeros(0, 0, 2, 0)
    return Observed(parts[:, :, 0].to(torch.int16).numpy(), parts[:, :, 1].float().numpy(), nll, layers)


def write_observed(path: Path, found: Observed) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **vars(found))
    replace_file(path, content.getvalue())


def read_observed(path: Path) -> Observed | None:
    """What `write_observed` wrote; None where there is nothing whole."""
    try:
        with np.load(path, allow_pickle=False) as data:
            return Observed(data["groups"], data["confidence"], data["nll"], data["layers"].tolist())
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
