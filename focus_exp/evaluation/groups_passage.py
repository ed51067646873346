"""One passage in full: where the base's attention lies that hard groups cut, and which distant pairs they keep."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.reference import scores, weights
from focus_exp.attention.selection import (
    Selection,
    Sequence,
    always_visible,
    permitted_or_self,
    row_blocks,
    same_group,
)
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.attached import disabled, observed, swapped
from focus_exp.models.modules import attached_methods
from focus_exp.training.precision import Precision

# heaviest keys of a query
LISTED = 3


class CutProbe(AttentionMethod):
    """Full attention that measures where its mass lies under another method's selection of the same tokens.

    Mass: attention averaged over heads; of a query the parts `near` (window and sinks), `kept` and `cut` (distant) add
    up to 1, each `[T]`. Keys of every query are (indices, mass, affinity g_i . g_j), each `[T, n]`: the heaviest that
    are kept and cut, with mass 0 where there are no more, and the closest that is kept, affinity -1 if there is none.
    """

    def __init__(self, shape: LayerShape, window: int, sinks: int, selection: Selection) -> None:
        super().__init__(shape, window, sinks)
        self.selection = selection
        self.near: Tensor
        self.kept: Tensor
        self.cut: Tensor
        self.kept_keys: tuple[Tensor, Tensor, Tensor]
        self.cut_keys: tuple[Tensor, Tensor, Tensor]
        self.close_keys: tuple[Tensor, Tensor, Tensor]
        self.kept_affinities: Tensor  # of all kept distant pairs
        self.distant_pairs = 0
        self.cut_by_key: Tensor  # [T], what all queries together lost of a key

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        sequence: Sequence,
        *,
        scaling: float,
        softcap: float | None = None,
        dropout: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        parts: dict[str, list[Tensor]] = {}
        outputs = []
        cut_by_key = torch.zeros(q.shape[2], dtype=torch.float64)
        g = self.selection.assignment
        assert g is not None
        for rows in row_blocks(q.shape[2], 256):
            length = rows.stop
            keep = permitted_or_self(sequence, rows, length)
            s = scores(q[:, :, rows], k[:, :, :length], scaling, softcap).masked_fill(~keep[:, None], float("-inf"))
            p = weights(s, sink_logits)  # [1, H, rows, S]
            values = v[:, :, :length].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            outputs.append(p.to(v.dtype) @ values)
            mass = p[0].mean(0)
            near = (always_visible(sequence, rows, length, self.window, self.sinks) & keep)[0]
            same = same_group(self.selection, rows, length)[0]
            affinity = (g[:, rows] @ g[:, :length].transpose(-1, -2))[0]
            kept, cut = keep[0] & ~near & same, keep[0] & ~near & ~same
            close = affinity.masked_fill(~kept, -1.0).max(-1, keepdim=True)
            found = {
                "near": (mass * near).sum(-1),
                "kept": (mass * kept).sum(-1),
                "cut": (mass * cut).sum(-1),
                "kept_affinities": affinity[kept],
                "close_index": close.indices,
                "close_mass": mass.gather(-1, close.indices),
                "close_affinity": close.values,
            }
            for name, pairs in (("kept", kept), ("cut", cut)):
                heaviest = F.pad(mass * pairs, (0, LISTED)).topk(LISTED)
                found |= {
                    f"{name}_index": heaviest.indices,
                    f"{name}_mass": heaviest.values,
                    f"{name}_affinity": F.pad(affinity, (0, LISTED)).gather(-1, heaviest.indices),
                }
            self.distant_pairs += int((keep[0] & ~near).sum())
            cut_by_key[:length] += (mass * cut).sum(0).double().cpu()
            for name, part in found.items():
                parts.setdefault(name, []).append(part.cpu())
        whole = {name: torch.cat(found) for name, found in parts.items()}
        self.near, self.kept, self.cut = whole["near"], whole["kept"], whole["cut"]
        self.kept_keys, self.cut_keys, self.close_keys = (
            (whole[f"{name}_index"], whole[f"{name}_mass"], whole[f"{name}_affinity"])
            for name in ("kept", "cut", "close")
        )
        self.cut_by_key = cut_by_key
        self.kept_affinities = whole["kept_affinities"]
        return torch.cat(outputs, dim=2)


@dataclass
class Cut:
    """A passage under hard groups and under full attention.

    nll_full, nll_hard: `[T]` nats, 0 for the first token. selections, probes: by layer.
    """

    nll_full: Tensor
    nll_hard: Tensor
    selections: dict[int, Selection] = field(default_factory=dict)
    probes: dict[int, CutProbe] = field(default_factory=dict)


@torch.no_grad()
def cut_passage(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> Cut:
    """Run `tokens` `[T]` with hard groups as they are set, with full attention, and once more to measure the latter.

    The pairs are those that hard groups cut when the model runs with them; the attention is the base's own.
    """
    batch = tokens[None].to(model.device)
    selections: dict[int, Selection] = {}

    def note(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        selections[layer] = selection

    with precision.context():
        with observed(model, note):
            hard = token_losses(model, batch)[0].cpu()
        with disabled(model):
            full = token_losses(model, batch)[0].cpu()
        probes = {
            index: CutProbe(method.shape, method.window, method.sinks, selections[index])
            for index, method in attached_methods(model).items()
        }
        with swapped(model, dict(probes)):
            model(input_ids=batch, use_cache=False, logits_to_keep=1)
    return Cut(full, hard, selections, probes)
