"""One passage in full: where the base's attention lies that hard groups cut, and which distant pairs they keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.dense import scores, weights
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    base_mask_or_self,
    group_mask,
    local_mask,
    row_blocks,
)
from focus_exp.evaluation.groups_observe import Grouping, groupings
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.methods import attached_methods, disable_method, observe_selections, swap_methods
from focus_exp.training.precision import Precision

# heaviest keys of a query
LISTED = 3


Keys = tuple[Tensor, Tensor, Tensor]


@dataclass
class CutMass:
    """Where full attention lies under the groups of one grouping.

    Mass: attention averaged over the heads that have these groups; of a query the parts `near` (window and sinks),
    `kept` and `cut` (distant) add up to 1, each `[T]`. Keys of every query are (indices, mass, affinity g_i . g_j),
    each `[T, n]`: the heaviest that are kept and cut, with mass 0 where there are no more, and the closest that is
    kept, affinity -1 if there is none. kept_affinities: of all kept distant pairs. cut_by_key: `[T]`, what all queries
    together lost of a key.
    """

    near: Tensor
    kept: Tensor
    cut: Tensor
    kept_keys: Keys
    cut_keys: Keys
    close_keys: Keys
    kept_affinities: Tensor
    distant_pairs: int
    cut_by_key: Tensor


class CutProbe(AttentionMethod):
    """Full attention that measures where its mass lies under another method's groups of the same tokens, one text."""

    def __init__(self, shape: LayerShape, window: int, sinks: int, selections: Mapping[Grouping, Selection]) -> None:
        super().__init__(shape, window, sinks)
        self.selections = selections
        self.masses: dict[Grouping, CutMass] = {}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        parts: dict[Grouping, dict[str, list[Tensor]]] = {grouping: {} for grouping in self.selections}
        outputs = []
        for rows in row_blocks(q.shape[2], 256):
            length = rows.stop
            keep = base_mask_or_self(sequence, rows, length)
            s = scores(q[:, :, rows], k[:, :, :length], args).masked_fill(~keep[:, None], float("-inf"))
            p = weights(s, args.sink_logits)  # [1, H, rows, S]
            values = v[:, :, :length].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            outputs.append(p.to(v.dtype) @ values)
            near = (local_mask(sequence, rows, length, self.window, self.sinks) & keep)[0]
            of_heads = p[0].unflatten(0, (len(self.selections), -1)).mean(1)
            for (grouping, selection), mass in zip(self.selections.items(), of_heads, strict=True):
                for name, part in parts_of(mass, selection, rows, near, keep[0] & ~near).items():
                    parts[grouping].setdefault(name, []).append(part.cpu())
        self.masses = {grouping: joined(found) for grouping, found in parts.items()}
        return torch.cat(outputs, dim=2)


def parts_of(mass: Tensor, selection: Selection, rows: slice, near: Tensor, distant: Tensor) -> dict[str, Tensor]:
    """Of the queries `rows`, what `joined` puts together; mass, near, distant: `[t, S]`."""
    length = mass.shape[-1]
    g = selection.assignment
    assert g is not None
    same = group_mask(selection, rows, length)[0]
    affinity = (g[:, rows] @ selection.effective_key_assignment[:, :length].transpose(-1, -2))[0]
    kept, cut = distant & same, distant & ~same
    close = affinity.masked_fill(~kept, -1.0).max(-1, keepdim=True)
    found = {
        "near": (mass * near).sum(-1),
        "kept": (mass * kept).sum(-1),
        "cut": (mass * cut).sum(-1),
        "kept_affinities": affinity[kept],
        "distant_pairs": distant.sum(-1),
        "cut_by_key": (mass * cut).sum(0).double(),
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
    return found


def joined(parts: dict[str, list[Tensor]]) -> CutMass:
    """Of blocks of queries, each of which sees the keys up to its own end."""
    by_key = parts.pop("cut_by_key")
    whole = {name: torch.cat(found) for name, found in parts.items()}
    keys = {
        f"{name}_keys": (whole.pop(f"{name}_index"), whole.pop(f"{name}_mass"), whole.pop(f"{name}_affinity"))
        for name in ("kept", "cut", "close")
    }
    length = len(whole["near"])
    return CutMass(
        near=whole["near"], kept=whole["kept"], cut=whole["cut"], kept_affinities=whole["kept_affinities"],
        distant_pairs=int(whole["distant_pairs"].sum()),
        cut_by_key=torch.stack([F.pad(part, (0, length - len(part))) for part in by_key]).sum(0), **keys,
    )  # fmt: skip


@dataclass
class Cut:
    """A passage under hard groups and under full attention.

    nll_full, nll_hard: `[T]` nats, 0 for the first token. selections, masses: of the layers that have groups.
    """

    nll_full: Tensor
    nll_hard: Tensor
    selections: dict[Grouping, Selection] = field(default_factory=dict)
    masses: dict[Grouping, CutMass] = field(default_factory=dict)


@torch.no_grad()
def cut_passage(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> Cut:
    """Run `tokens` `[T]` with hard groups as they are set, with full attention, and once more to measure the latter.

    The pairs are those that hard groups cut when the model runs with them; the attention is the base's own.
    """
    batch = tokens[None].to(model.device)
    selections: dict[int, dict[Grouping, Selection]] = {}

    def note(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        if own := groupings(layer, selection):
            selections[layer] = own

    with precision.context():
        with observe_selections(model, note):
            hard = token_losses(model, batch)[0].cpu()
        with disable_method(model):
            full = token_losses(model, batch)[0].cpu()
        probes = {
            index: CutProbe(method.shape, method.window, method.sinks, selections[index])
            for index, method in attached_methods(model).items()
            if index in selections
        }
        with swap_methods(model, dict(probes)):
            model(input_ids=batch, use_cache=False, logits_to_keep=1)
    masses = {grouping: mass for probe in probes.values() for grouping, mass in probe.masses.items()}
    return Cut(full, hard, {g: s for own in selections.values() for g, s in own.items()}, masses)
