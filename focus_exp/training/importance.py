"""What the distant pairs of a frozen model are worth, read from one pass forward and one back through a text.

To first order, taking key j from query i moves the output o_i of a head by -P_ij (v_j - o_i), and the loss by
P_ij (o_i - v_j) . dL/do_i. Its square is the pair's importance.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.reference import scores, weights
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, always_visible, permitted, row_blocks
from focus_exp.models.methods import swap_methods
from focus_exp.progress import ProgressBar
from focus_exp.storage import atomic_write
from focus_exp.training.precision import Precision

KEPT = 48  # keys of a query: they hold 99 % of its importance in SmolLM2-135M
ROWS = 256


@dataclass
class Observed:
    """What a layer's encoders learn from, of T tokens and G key/value heads.

    hidden: `[T, E]` bfloat16. vectors: `[T, G, D]` bfloat16, the layer's own keys.
    keys: `[T, G, M]` int32, each query's most important distant keys; share: `[T, G, M]` float16, of the query's
    importance that each has. total: `[T, G]` float32, the importance of all distant keys of the query.
    """

    hidden: Tensor
    vectors: Tensor
    keys: Tensor
    share: Tensor
    total: Tensor


@dataclass
class Changes:
    """Of the queries `rows` of a text: which pairs are distant ones that the layer has `[t, S]` bool, attention on
    those, and the change of the loss [nats] if each were removed, both `[G, H / G, t, S]`, by key/value head and the
    query heads that read it."""

    rows: slice
    distant: Tensor
    attention: Tensor
    loss: Tensor


class LossProbe(AttentionMethod):
    """Full attention whose `note` is given the changes of the loss when that is propagated back through it."""

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        self.hidden = h.detach()
        return Selection()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        output = super().attend(q, k, v, Selection(keeps_all=True), sequence, args)
        q, k, v = (x.detach().float() for x in (q, k, v))

        def changes(gradient: Tensor) -> Iterator[Changes]:
            for rows in row_blocks(q.shape[2], ROWS):
                seen = permitted(sequence, rows, rows.stop)
                p, loss = changes_of_loss(
                    q[:, :, rows], k[:, :, : rows.stop], v[:, :, : rows.stop], gradient[:, :, rows].float(),
                    seen, args,
                )  # fmt: skip
                distant = (seen & ~always_visible(sequence, rows, rows.stop, self.window, self.sinks))[0]
                yield Changes(rows, distant, p[0] * distant, loss[0] * distant)

        if output.requires_grad:
            output.register_hook(lambda gradient: self.note(k[0], changes(gradient)))
        return output

    @abstractmethod
    def note(self, k: Tensor, changes: Iterator[Changes]) -> None:
        """Of keys `[G, T, D]` and the distant pairs' changes, some queries at a time."""


# what pairs are worth `[G, t, S]` to all heads that read a key
WORTH: dict[str, Callable[[Changes], Tensor]] = {
    "loss": lambda pairs: pairs.loss.square().sum(1),
    "attention": lambda pairs: pairs.attention.sum(1),
}


class ImportanceProbe(LossProbe):
    """Notes its `Observed`, by what WORTH says of pairs under this name."""

    observed: Observed

    def __init__(self, shape: LayerShape, window: int, sinks: int, worth: str = "loss") -> None:
        super().__init__(shape, window, sinks)
        self.worth = worth

    def note(self, k: Tensor, changes: Iterator[Changes]) -> None:
        length = k.shape[1]
        found = [strongest(WORTH[self.worth](part), min(KEPT, length)) for part in changes]
        parts = zip(*found, strict=True)
        keys, share, total = (torch.cat(part, 1).transpose(0, 1).contiguous().cpu() for part in parts)
        hidden = self.hidden[0].to(torch.bfloat16).cpu()
        self.observed = Observed(hidden, k.transpose(0, 1).bfloat16().cpu(), keys, share, total)


def changes_of_loss(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gradient: Tensor,
    seen: Tensor,
    args: AttentionArgs,
) -> tuple[Tensor, Tensor]:
    """Attention P_ij, and the first-order change of the loss without the pair, P_ij (o_i - v_j) . dL/do_i, both
    `[B, G, H / G, t, S]`.

    q, gradient: `[B, H, t, D]`; k, v: `[B, G, S, D]`; seen: `[B, t, S]`, what a query sees of the keys.
    """
    s = scores(q, k, args)
    p = weights(s.masked_fill(~seen[:, None], float("-inf")), args.sink_logits)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    output = p @ values
    change = p * ((gradient * output).sum(-1, keepdim=True) - gradient @ values.transpose(-1, -2))
    groups = (v.shape[1], -1)
    return p.unflatten(1, groups), change.unflatten(1, groups)


def strongest(pairs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of importances `[G, t, S]` the `count` largest of each query: keys and shares `[G, t, count]`, total `[G, t]`."""
    total = pairs.sum(-1)
    pairs = F.pad(pairs, (0, max(0, count - pairs.shape[-1])))
    values, keys = pairs.topk(count, -1)
    # a key that is not worth anything may be one of padding
    keys = keys.masked_fill(values == 0, 0)
    return keys.int(), (values / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]).half(), total


def propagate(model: PreTrainedModel, probes: Mapping[int, LossProbe], block: Tensor, precision: Precision) -> None:
    """One pass of the text `block` `[T]` forward and back, with `probes` in their layers; no weight gets a gradient."""
    with swap_methods(model, dict(probes)), precision.context(), torch.enable_grad():
        embedded = model.get_input_embeddings()(block[None].to(model.device)).detach().requires_grad_(True)
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits.float(), block[1:].to(logits.device), reduction="sum")
        torch.autograd.grad(loss, embedded)


def observe(
    model: PreTrainedModel,
    methods: Mapping[int, AttentionMethod],
    blocks: list[Tensor],
    precision: Precision,
    folder: Path,
    worth: str = "loss",
) -> list[Path]:
    """Observe the layers of `methods` on each block `[T]` of token ids; one file of `folder` a block, which is read
    rather than made again."""
    paths = [folder / f"block-{index:05d}.safetensors" for index in range(len(blocks))]
    todo = [(path, block) for path, block in zip(paths, blocks, strict=True) if not path.exists()]
    for path, block in ProgressBar(todo, desc="reading what pairs are worth", unit="block"):
        probes = {i: ImportanceProbe(m.shape, m.window, m.sinks, worth) for i, m in methods.items()}
        propagate(model, probes, block, precision)
        tensors = {
            f"{index}.{item.name}": getattr(probe.observed, item.name)
            for index, probe in probes.items()
            for item in fields(Observed)
        }
        with atomic_write(path) as new:
            save_file(tensors, new)
    return paths


def read(paths: list[Path], layer: int) -> list[Observed]:
    """What `observe` wrote of one layer, by block."""
    found = []
    for path in paths:
        with safe_open(path, "pt") as file:
            found.append(Observed(*(file.get_tensor(f"{layer}.{item.name}") for item in fields(Observed))))
    return found
