"""Fit the gates of `key_gate` to the importance of keys, from the observations of `focus_dual`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.key_gate import GateTraining, KeyGate
from focus_exp.training.focus_dual_fit.encoders import (
    MAX_VALUE,
    VALUE_DECAY,
    draw_index,
    minimize,
    standardize,
    standardized_tokens,
)
from focus_exp.training.focus_dual_fit.importance import Observation, fit_scores
from focus_exp.training.precision import Precision


def fit_gates(
    model: PreTrainedModel, sequences: list[Tensor], options: GateTraining, precision: Precision, cache: Path, seed: int
) -> float:
    """Fit the gates of all layers to `sequences` `(T,)`, and set their common threshold.

    Returns:
        the seconds in all runs that worked on the gates; runs that differ in density share one fit.
    """

    def fit(method: KeyGate, observations: list[Observation], generator: torch.Generator) -> dict[str, Tensor]:
        fit_gate(method, observations, options.fit_steps, options.fit_learning_rate, generator)
        scores = torch.cat([method.scores(standardized_tokens(x, method)) for x in observations])
        queries = torch.cat([later_queries(method, len(x.hidden)) for x in observations])
        return method.state_dict() | {"scores": scores.detach(), "queries": queries}

    methods, states, seconds = fit_scores(model, KeyGate, sequences, options, precision, cache, seed, fit)
    measured = [(state.pop("scores"), state.pop("queries")) for state in states.values()]
    threshold = find_threshold(
        torch.cat([scores.flatten() for scores, _ in measured]),
        torch.cat([queries[:, None].expand_as(scores).flatten() for scores, queries in measured]),
        options.density,
    )
    for layer, state in states.items():
        methods[layer].load_state_dict(state | {"threshold": threshold})
    return seconds


def fit_gate(
    method: KeyGate, observations: list[Observation], steps: int, learning_rate: float, generator: torch.Generator
) -> None:
    """Fit the log importance of a key per later query by Poisson regression on its token."""
    standardize(method, observations)
    device = method.mean.device
    tokens = [standardized_tokens(x, method) for x in observations]
    importance = [key_importance(x).to(device) for x in observations]
    queries = [later_queries(method, len(x)).to(device)[:, None].float() for x in tokens]
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
    minimize(loss, [method.weight, method.bias], learning_rate, steps)
    with torch.no_grad():  # from here on scores compare across heads and layers
        method.bias.add_(rate.log())


def key_importance(observation: Observation) -> Tensor:
    """Return the importance of each key to all later queries, `(T, n)`."""
    values = (observation.fractions.float() * observation.total[..., None]).transpose(1, 2).flatten(0, 1)
    keys = observation.keys.long().transpose(1, 2).flatten(0, 1)
    return torch.zeros(observation.total.shape).scatter_add_(0, keys, values)


def later_queries(method: KeyGate, length: int) -> Tensor:
    """Return for how many queries of a sequence each key is distant, `(T,)` int; 0 for sinks."""
    place = torch.arange(length)
    return (length - 1 - method.window - place).clamp(min=0).where(place >= method.sinks, 0)


def find_threshold(scores: Tensor, queries: Tensor, density: float) -> Tensor:
    """Return the score that keys with at most `density` of all distant pairs pass; a key has `queries` of them."""
    order = scores.argsort(descending=True)
    kept = queries[order].double().cumsum(0)
    count = int((kept <= density * kept[-1]).sum())
    return scores[order[count]] if count < len(order) else scores.new_tensor(float("-inf"))
