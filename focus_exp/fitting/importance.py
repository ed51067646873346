"""Importance of the distant pairs of a frozen model, from one forward and one backward pass.

To first order, pruning key j from query i moves the output o_i of a head by -P_ij (v_j - o_i), and the loss by
P_ij (o_i - v_j) . dL/do_i. The square of that change is the pair's importance.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.dense import scores, weights
from focus_exp.attention.router import disable_autocast
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, base_mask, local_mask, row_blocks
from focus_exp.models.head import Head
from focus_exp.models.methods import attached_methods, swap_methods
from focus_exp.progress import ProgressBar
from focus_exp.storage import atomic_write
from focus_exp.training.precision import Precision

MAX_THREADS = 4  # layers that are fitted at a time: each takes about 0.4 GB in SmolLM2-135M
TOP_KEYS = 48  # stored per query: they hold 99 % of its importance in SmolLM2-135M
ROWS = 64  # queries at a time


@dataclass
class Observation:
    """Training data of a layer's encoders, for T tokens and G key/value heads.

    Args:
        hidden: `(T, E)` bfloat16, inputs of self-attention.
        vectors: `(T, G, D)` bfloat16, keys.
        keys: `(T, G, M)` int32, the most important distant keys of each query.
        fractions: `(T, G, M)` float16, of the query's importance that each of them has.
        total: `(T, G)` float32, importance of all distant keys of the query.
        first: `(T,)` int32, first key that the base model lets each query see.
    """

    hidden: Tensor
    vectors: Tensor
    keys: Tensor
    fractions: Tensor
    total: Tensor
    first: Tensor


@dataclass
class PairChanges:
    """Pairs of t queries and S keys; H / G query heads share a key/value head.

    Args:
        rows: the queries.
        distant: `(t, S)` bool, causal pairs beyond window and sinks.
        attention: `(G, H / G, t, S)`, attention weights.
        loss: `(G, H / G, t, S)`, first-order change of the loss without the pair [nats].
        first: `(t,)`, first key that each query sees.
    """

    rows: slice
    distant: Tensor
    attention: Tensor
    loss: Tensor
    first: Tensor


class ProbedAttention(AttentionMethod):
    """Stand in for the methods of layers that are not fitted: the fit is to the frozen base."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        return super().attend(q, k, v, Selection(is_dense=True), sequence, args)


class LossProbe(ProbedAttention):
    """Full attention that passes the pairs' changes of the loss to `record` during the backward pass."""

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        self.hidden = h.detach()
        return Selection()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        output = super().attend(q, k, v, selection, sequence, args)
        q, k, v, o = (x.detach().float() for x in (q, k, v, output))

        def changes(gradient: Tensor) -> Iterator[PairChanges]:
            for rows in row_blocks(q.shape[2], ROWS):
                visible = base_mask(sequence, rows, rows.stop)
                keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
                of_rows = o[:, :, rows], gradient[:, :, rows].float()
                p, loss = loss_changes(q[:, :, rows], keys, values, *of_rows, visible, args)
                distant = (visible & ~local_mask(sequence, rows, rows.stop, self.window, self.sinks))[0]
                yield PairChanges(rows, distant, p[0], loss[0], visible[0].int().argmax(-1))

        def record(gradient: Tensor) -> None:
            with disable_autocast(gradient):
                self.record(k[0], changes(gradient))

        if output.requires_grad:
            output.register_hook(record)
        return output

    @abstractmethod
    def record(self, k: Tensor, changes: Iterator[PairChanges]) -> None:
        """Record the changes of a sequence with keys `(G, T, D)`, some queries at a time."""


# importance `(G, t, S)` of distant pairs, summed over the query heads that share a key
IMPORTANCE: dict[str, Callable[[PairChanges], Tensor]] = {
    "loss": lambda pairs: pairs.loss.square().sum(1) * pairs.distant,
    "attention": lambda pairs: pairs.attention.sum(1) * pairs.distant,
}


class ImportanceProbe(LossProbe):
    """Record an `Observation`, with the importance of that name in IMPORTANCE."""

    observation: Observation

    def __init__(self, method: AttentionMethod, importance: str = "loss") -> None:
        super().__init__(method.shape, method.window, method.sinks)
        self.importance = IMPORTANCE[importance]

    def record(self, k: Tensor, changes: Iterator[PairChanges]) -> None:
        first, top = [], []
        for part in changes:
            first.append(part.first.int())
            top.append(top_keys(self.importance(part), min(TOP_KEYS, k.shape[1])))
        keys, fractions, total = (torch.cat(x, 1).transpose(0, 1) for x in zip(*top, strict=True))
        hidden, vectors = self.hidden[0].to(torch.bfloat16), k.transpose(0, 1).bfloat16()
        recorded = (hidden, vectors, keys, fractions, total, torch.cat(first))
        self.observation = Observation(*(x.cpu() for x in recorded))  # the device has no room for those of all layers


def loss_changes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    gradient: Tensor,
    visible: Tensor,
    args: AttentionArgs,
) -> tuple[Tensor, Tensor]:
    """Compute attention P_ij and the first-order change of the loss, P_ij (o_i - v_j) . dL/do_i.

    Args:
        q, output, gradient: `(B, H, t, D)`, the output that of attention.
        k, v: `(B, G, S, D)`.
        visible: `(B, t, S)`, keys that a query attends to.

    Returns:
        Both `(B, G, H / G, t, S)`.
    """
    s = scores(q, k, args)
    p = weights(s.masked_fill_(~visible[:, None], float("-inf")), args.sink_logits)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    change = gradient @ values.transpose(-1, -2)
    torch.sub((gradient * output).sum(-1, keepdim=True), change, out=change).mul_(p)
    groups = (v.shape[1], -1)
    return p.unflatten(1, groups), change.unflatten(1, groups)


def top_keys(importance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Select the `count` most important keys of each query from `(G, t, S)`.

    Returns:
        Keys and their fractions `(G, t, count)`, and the total `(G, t)`.
    """
    total = importance.sum(-1)
    importance = F.pad(importance, (0, max(0, count - importance.shape[-1])))
    values, keys = importance.topk(count, -1)
    keys = keys.masked_fill(values == 0, 0)  # an unimportant key may be padding
    return keys.int(), (values / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]).half(), total


@contextmanager
def attached_probes(model: PreTrainedModel, probes: Mapping[int, AttentionMethod]) -> Iterator[None]:
    """Put `probes` into their layers in the block, and full attention into the others."""
    others = {i: ProbedAttention(m.shape) for i, m in attached_methods(model).items() if i not in probes}
    with swap_methods(model, {**others, **probes}):
        yield


def backpropagate(head: Head, probes: Mapping[int, LossProbe], tokens: Tensor, precision: Precision) -> None:
    """Run tokens `(T,)` forward and back with `probes` in the layers; no weight gets a gradient."""
    model = head.model
    with attached_probes(model, probes), precision.context(), torch.enable_grad():
        embedded = model.get_input_embeddings()(tokens[None].to(model.device)).detach().requires_grad_(True)
        targets = tokens[1:].to(model.device)
        predicted = head.inputs(inputs_embeds=embedded)[0, :-1]
        torch.autograd.grad(head.sum_cross_entropy(predicted, targets), embedded)


def fitted_methods(model: PreTrainedModel) -> dict[int, Any]:
    """Return the attached methods that are fitted, by layer; a budget may have removed what is fitted."""
    return {i: m for i, m in attached_methods(model).items() if m.is_fitted}


def record_observations(
    model: PreTrainedModel,
    methods: Mapping[int, AttentionMethod],
    sequences: list[Tensor],
    precision: Precision,
    folder: Path,
    make_probe: Callable[[Any], Any] = ImportanceProbe,
) -> list[Path]:
    """Write the observations of all layers on each sequence `(T,)` to a file of `folder`, unless it exists.

    make_probe: makes what stands in for a method and has an `observation` after a pass.
    """
    paths = [folder / f"block-{index:05d}.safetensors" for index in range(len(sequences))]
    pairs, head = list(zip(paths, sequences, strict=True)), Head(model)
    for path, tokens in ProgressBar(pairs, desc="measuring importance", unit="sequence"):

        def observe(tokens: Tensor = tokens) -> dict[str, Tensor]:
            probes = {i: make_probe(method) for i, method in methods.items()}
            if all(isinstance(probe, LossProbe) for probe in probes.values()):
                backpropagate(head, probes, tokens, precision)
            else:
                with attached_probes(model, probes), precision.context(), torch.no_grad():
                    model(tokens[None].to(model.device), use_cache=False, logits_to_keep=1)
            return {
                f"{layer}.{name}": x.contiguous()
                for layer, probe in probes.items()
                for name, x in vars(probe.observation).items()
            }

        load_or_compute(path, observe)
    return paths


def read_observations(paths: list[Path], layer: int, kind: type[Any] = Observation) -> list[Any]:
    """Read one layer's observations, of that dataclass, by sequence."""
    observations = []
    for path in paths:
        with safe_open(path, "pt") as file:
            observations.append(kind(*(file.get_tensor(f"{layer}.{item.name}") for item in fields(kind))))
    return observations


Result = TypeVar("Result")


def count_fit_threads(device: torch.device) -> int:
    """Return how many layers are fitted at a time."""
    return min(torch.get_num_threads(), MAX_THREADS) if device.type == "cpu" else 1


def map_in_threads(function: Callable[[int], Result], layers: list[int], device: torch.device) -> Iterator[Result]:
    """Yield function(layer) of each layer in order, computed by threads of one core each.

    The operations of a fit are small: spread over cores they wait for each other, most of all on a busy machine.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count_fit_threads(device), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(function, layers)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # of MKL, which has one number for all threads


def load_or_compute(
    path: Path, compute: Callable[[], dict[str, Tensor]], earlier: float = 0.0
) -> tuple[dict[str, Tensor], float]:
    """Read the tensors in `path`, or compute and write them; returns them and the seconds that they took."""
    if not path.exists():
        began = time.perf_counter()
        tensors = compute()
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, {"seconds": f"{earlier + time.perf_counter() - began:.3f}"})
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, read_seconds(path)  # noqa: SIM118


def read_seconds(path: Path) -> float:
    """Return the seconds that the tensors in `path` took; 0 for files of earlier versions, which do not say."""
    with safe_open(path, "pt") as file:
        return float((file.metadata() or {}).get("seconds", 0.0))
