"""Fit `token_indexer` and `key_gate` to the observations of `focus_dual`, and `block_gate` to attention by block."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.block_gate import POOLS, BlockGate
from focus_exp.attention.baselines.block_means import KeyBlocks
from focus_exp.attention.baselines.key_gate import KeyGate
from focus_exp.attention.baselines.top_tokens import TokenIndexer
from focus_exp.attention.dense import scores, weights
from focus_exp.attention.router import disable_autocast
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    base_mask,
    causal_mask,
    local_mask,
    row_blocks,
)
from focus_exp.config import FitConfig
from focus_exp.fitting.encoders import (
    MAX_VALUE,
    VALUE_DECAY,
    draw_index,
    minimize,
    query_weights,
    standardized_tokens,
)
from focus_exp.fitting.importance import ROWS, Observation, ProbedAttention

QUERIES_PER_STEP = 512


def fit_indexer(
    method: TokenIndexer, observations: list[Observation], options: FitConfig, generator: torch.Generator
) -> None:
    """Minimize the cross-entropy of a query's scores over distant keys to their importance."""
    tokens = [standardized_tokens(x, method) for x in observations]
    importances = [pair_importance(x).to(method.mean.device) for x in observations]
    mean = torch.stack([x.sum() for x in importances]).sum() / sum(map(len, importances))

    def loss(step: int) -> Tensor:
        index = draw_index(len(tokens), generator)
        x, importance = tokens[index], importances[index]
        rows = torch.randperm(len(x), generator=generator)[:QUERIES_PER_STEP].to(x.device)
        distant = distant_pairs(method, observations[index].first.to(x.device))[rows]
        return selection_loss(method.scores(x[rows], x), importance[rows], distant, mean)

    minimize(loss, list(method.parameters()), options.learning_rate, options.steps)


@dataclass
class BlockObservation:
    """Training data of a layer's block gate, for T tokens in N blocks.

    Args:
        queries: `(G, H / G, T, D)` float16, scaled.
        pooled: `(G, N, 3 D)` float16, pooled keys.
        mass: `(G, H / G, T, N)` float16, a query's attention to the distant keys of each block.
        candidates: `(T, N)` bool, blocks before its own in which a query has distant keys.
    """

    queries: Tensor
    pooled: Tensor
    mass: Tensor
    candidates: Tensor


class BlockProbe(ProbedAttention):
    """Full attention that records a `BlockObservation`."""

    observation: BlockObservation

    def __init__(self, method: BlockGate) -> None:
        super().__init__(method.shape, method.window, method.sinks)
        self.keys_per_block = method.keys_per_block

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        with disable_autocast(q):
            self.observation = self.observe(q.float(), k.float(), sequence, args)
        return super().attend(q, k, v, selection, sequence, args)

    def observe(self, q: Tensor, k: Tensor, sequence: Sequence, args: AttentionArgs) -> BlockObservation:
        blocks = KeyBlocks.of(sequence, self.keys_per_block, self.sinks)
        assert blocks.index is not None
        of_token = F.one_hot(blocks.index[0]).float()  # (T, N)
        mass, candidates = [], []
        for rows in row_blocks(q.shape[2], ROWS):
            visible = base_mask(sequence, rows, rows.stop)
            s = scores(q[:, :, rows], k[:, :, : rows.stop], args).masked_fill(~visible[:, None], -torch.inf)
            p = weights(s, args.sink_logits)
            distant = visible[0] & ~local_mask(sequence, rows, rows.stop, self.window, self.sinks)[0]
            before = torch.arange(of_token.shape[1], device=q.device) < blocks.index[0, rows, None]
            mass.append(p[0] * distant @ of_token[: rows.stop] * before)
            candidates.append((distant.float() @ of_token[: rows.stop] > 0) & before)
        heads = (k.shape[1], -1)
        queries = q[0].unflatten(0, heads) * args.scaling
        pooled = torch.cat([blocks.pool(k, pool)[0] for pool in POOLS], -1)
        fractions = torch.cat(mass, 1).unflatten(0, heads)
        queries, pooled, fractions = (x.half().cpu() for x in (queries, pooled, fractions))
        return BlockObservation(queries, pooled, fractions, torch.cat(candidates).cpu())


def fit_block_gate(
    method: BlockGate, observations: list[BlockObservation], options: FitConfig, generator: torch.Generator
) -> None:
    """Minimize the cross-entropy of a query's scores over distant blocks to their attention mass."""
    device = method.weight.device
    sequences = [BlockObservation(*(getattr(x, item.name).to(device) for item in fields(x))) for x in observations]
    mean = torch.stack([x.mass.float().sum(-1).mean() for x in sequences]).mean()

    def loss(step: int) -> Tensor:
        x = sequences[draw_index(len(sequences), generator)]
        keys = method.map_pooled(x.pooled.float())[:, None]
        return selection_loss(x.queries.float() @ keys.transpose(-1, -2), x.mass.float(), x.candidates, mean)

    minimize(loss, list(method.parameters()), options.learning_rate, options.steps)


def selection_loss(scores: Tensor, importance: Tensor, candidates: Tensor, mean: Tensor) -> Tensor:
    """Compute the cross-entropy of scores `(..., t, N)` to importance `(..., t, N)`, queries weighted by their total.

    Args:
        candidates: `(t, N)` bool.
        mean: of a query's total importance.
    """
    log_p = scores.masked_fill(~candidates, -1e9).log_softmax(-1)
    total = importance.sum(-1, keepdim=True)
    weight = query_weights(total, mean)
    target = importance / total.clamp(min=1e-30)
    return -(weight * target * log_p).sum() / weight.sum().clamp(min=1e-6)


def pair_importance(observation: Observation) -> Tensor:
    """Return the importance `(T, T)` of each pair, summed over heads."""
    values = (observation.fractions.float() * observation.total[..., None]).flatten(1)
    return torch.zeros(len(values), len(values)).scatter_add_(1, observation.keys.flatten(1).long(), values)


def distant_pairs(method: AttentionMethod, first: Tensor) -> Tensor:
    """Return the pairs beyond window and sinks, `(T, T)` bool, of queries that see the keys from `first` `(T,)` on."""
    length, device = len(first), first.device
    rows = slice(0, length)
    local = local_mask(Sequence.plain(1, length, device), rows, length, method.window, method.sinks)[0]
    return causal_mask(rows, length, device) & ~local & (torch.arange(length, device=device) >= first[:, None])


def fit_gate(
    method: KeyGate, observations: list[Observation], options: FitConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Fit the log importance of a key per later query by Poisson regression on its token.

    Returns:
        scores `(N, n)` of all keys, and the number of later queries `(N,)`, for `set_threshold`.
    """
    device = method.mean.device
    tokens = [standardized_tokens(x, method) for x in observations]
    importance = [key_importance(x).to(device) for x in observations]
    counts = [distant_pairs(method, x.first.to(device)).sum(0) for x in observations]  # of queries, by key
    queries = [x[:, None].float() for x in counts]
    mean = torch.cat(queries).mean().clamp(min=1e-6)
    rate = torch.cat(importance).sum(0) / torch.cat(queries).sum().clamp(min=1)  # (n,)
    rate = rate.clamp(min=torch.finfo(rate.dtype).tiny)

    def loss(step: int) -> Tensor:
        index = draw_index(len(tokens), generator)
        score = method.scores(tokens[index]).clamp(-8, 8)
        value = (importance[index] / (rate * mean)).clamp(max=MAX_VALUE)
        decay = VALUE_DECAY * method.weight.square().sum() / len(method.weight)
        return (queries[index] / mean * score.exp() - value * score).mean() + decay

    with torch.no_grad():
        method.weight.zero_()
        method.bias.zero_()
    minimize(loss, [method.weight, method.bias], options.learning_rate, options.steps)
    with torch.no_grad():  # from here on scores compare across heads and layers
        method.bias.add_(rate.log())
        scores = torch.cat([method.scores(x) for x in tokens])
    return {"scores": scores, "queries": torch.cat(counts)}


def key_importance(observation: Observation) -> Tensor:
    """Return the importance of each key to all later queries, `(T, n)`."""
    values = (observation.fractions.float() * observation.total[..., None]).transpose(1, 2).flatten(0, 1)
    keys = observation.keys.long().transpose(1, 2).flatten(0, 1)
    return torch.zeros(observation.total.shape).scatter_add_(0, keys, values)


def set_threshold(states: dict[int, dict[str, Tensor]], density: float) -> None:
    """Add to the layers' states the common threshold of their measured scores, which are removed."""
    measured = [(state.pop("scores"), state.pop("queries")) for state in states.values()]
    threshold = find_threshold(
        torch.cat([scores.flatten() for scores, _ in measured]),
        torch.cat([queries[:, None].expand_as(scores).flatten() for scores, queries in measured]),
        density,
    )
    for state in states.values():
        state["threshold"] = threshold


def find_threshold(scores: Tensor, queries: Tensor, density: float) -> Tensor:
    """Return the score that keys with at most `density` of all distant pairs pass; a key has `queries` of them."""
    order = scores.argsort(descending=True)
    kept = queries[order].double().cumsum(0)
    count = int((kept <= density * kept[-1]).sum())
    return scores[order[count]] if count < len(order) else scores.new_tensor(float("-inf"))
