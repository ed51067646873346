"""Fit the token indexer of each layer to the importance of its pairs, from the observations of `focus_dual`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.baselines.top_tokens import TokenIndexer
from focus_exp.attention.options import FitOptions
from focus_exp.attention.selection import Sequence, causal_mask, local_mask
from focus_exp.training.focus_dual_fit.encoders import (
    draw_index,
    minimize,
    query_weights,
    standardize,
    standardized_tokens,
)
from focus_exp.training.focus_dual_fit.importance import Observation, fit_scores
from focus_exp.training.precision import Precision

QUERIES_PER_STEP = 512


def fit_indexers(
    model: PreTrainedModel, sequences: list[Tensor], options: FitOptions, precision: Precision, cache: Path, seed: int
) -> float:
    """Fit the indexers of all layers to `sequences` `(T,)`; returns the seconds in all runs that worked on them."""

    def fit(method: TokenIndexer, observations: list[Observation], generator: torch.Generator) -> dict[str, Tensor]:
        fit_indexer(method, observations, options.fit_steps, options.fit_learning_rate, generator)
        return method.state_dict()

    methods, states, seconds = fit_scores(model, TokenIndexer, sequences, options, precision, cache, seed, fit)
    for layer, state in states.items():
        methods[layer].load_state_dict(state)
    return seconds


def fit_indexer(
    method: TokenIndexer, observations: list[Observation], steps: int, learning_rate: float, generator: torch.Generator
) -> None:
    """Minimize the cross-entropy of a query's scores over distant keys to their importance."""
    standardize(method, observations)
    tokens = [standardized_tokens(x, method) for x in observations]
    importances = [pair_importance(x).to(method.mean.device) for x in observations]
    mean = torch.stack([x.sum() for x in importances]).sum() / sum(map(len, importances))

    def loss(step: int) -> Tensor:
        index = draw_index(len(tokens), generator)
        x, importance = tokens[index], importances[index]
        rows = torch.randperm(len(x), generator=generator)[:QUERIES_PER_STEP].to(x.device)
        scores = method.scores(x[rows], x)
        log_p = scores.masked_fill(~distant_pairs(method, len(x), x.device)[rows], -1e9).log_softmax(-1)
        total = importance[rows].sum(-1, keepdim=True)
        weight = query_weights(total, mean)
        target = importance[rows] / total.clamp(min=1e-30)
        return -(weight * target * log_p).sum() / weight.sum().clamp(min=1e-6)

    minimize(loss, list(method.parameters()), learning_rate, steps)


def pair_importance(observation: Observation) -> Tensor:
    """Return the importance `(T, T)` of each pair, summed over heads."""
    values = (observation.fractions.float() * observation.total[..., None]).flatten(1)
    return torch.zeros(len(values), len(values)).scatter_add_(1, observation.keys.flatten(1).long(), values)


def distant_pairs(method: TokenIndexer, length: int, device: torch.device) -> Tensor:
    """Return the causal pairs beyond window and sinks, `(T, T)` bool."""
    rows = slice(0, length)
    visible = local_mask(Sequence.plain(1, length, device), rows, length, method.window, method.sinks)[0]
    return causal_mask(rows, length, device) & ~visible
