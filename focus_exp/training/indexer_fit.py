"""Fit the token indexer of each layer to what its pairs are worth, from the same observations as `focus_dual`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.baselines.top_tokens import TokenIndexer, best
from focus_exp.attention.options import FitOptions
from focus_exp.attention.selection import Sequence, always_visible, causal
from focus_exp.models.methods import attached_methods
from focus_exp.training.encoder_fit import HEAVIEST, adam, standardise, tokens_of, update
from focus_exp.training.importance import Observed
from focus_exp.training.kept_fit import SECONDS, fit_layers, kept_fit, seconds_in
from focus_exp.training.precision import Precision

SHARES = (0.05, 0.1, 0.2, 0.3)  # of the distant pairs, at which a fit is measured
QUERIES = 512  # of a step
RATE = 0.005


def fit_indexers(
    model: PreTrainedModel, blocks: list[Tensor], options: FitOptions, precision: Precision, cache: Path, seed: int
) -> float:
    """Fit the indexers of all layers to `blocks`, each `[T]` token ids, the last `validation_sequences` of which only
    measure; the seconds that it took, in whichever runs it was made."""
    methods = {layer: m for layer, m in attached_methods(model).items() if isinstance(m, TokenIndexer)}
    shapes = {layer: [method.window, method.sinks, *method.key_projection.shape] for layer, method in methods.items()}

    def fit(method: TokenIndexer, texts: list[Observed], generator: torch.Generator) -> dict[str, Tensor]:
        fit_indexer(method, texts[: -options.validation_sequences], options.fit_steps, generator)
        return method.state_dict() | {"measured": measured(method, texts[-options.validation_sequences :])}

    decide = shapes, [options.validation_sequences, options.fit_steps, seed]
    with kept_fit(cache, model, blocks, precision, ["indexer"], *decide) as folder:
        found = fit_layers(model, methods, blocks, precision, folder, seed, fit)
        seconds = seconds_in(folder / SECONDS)
    sums = torch.zeros(len(SHARES), 3, dtype=torch.float64)
    for layer, tensors in found.items():
        sums += tensors.pop("measured")
        methods[layer].load_state_dict(tensors)
    print("indexers fitted; of what the distant pairs of held-out text are worth they keep")
    for share, (worth, kept, most) in zip(SHARES, sums.tolist(), strict=True):
        print(f"  {kept / worth:.1%} with {share:.0%} of the pairs ({most / worth:.1%} with the best ones)")
    return seconds


def fit_indexer(method: TokenIndexer, observed: list[Observed], steps: int, generator: torch.Generator) -> None:
    """Lower the cross-entropy of the softmax of a query's scores over its distant tokens to where their worth lies."""
    standardise(method, observed)
    tokens = [tokens_of(x, method) for x in observed]
    worths = [worth_of(x).to(method.mean.device) for x in observed]
    mean = torch.stack([worth.sum() for worth in worths]).sum() / sum(map(len, worths))
    parameters = list(method.parameters())
    optimizer, schedule = adam(parameters, RATE, steps)
    with torch.enable_grad():
        for _ in range(steps):
            text = int(torch.randint(len(tokens), (), generator=generator))
            x, worth = tokens[text], worths[text]
            rows = torch.randperm(len(x), generator=generator)[:QUERIES].to(x.device)
            scores = method.scores(x[rows], x)
            log_p = scores.masked_fill(~distant(method, len(x), x.device)[rows], -1e9).log_softmax(-1)
            total = worth[rows].sum(-1, keepdim=True)
            weight = (total / mean.clamp(min=1e-30)).clamp(max=HEAVIEST)
            share = worth[rows] / total.clamp(min=1e-30)
            update(optimizer, schedule, -(weight * share * log_p).sum() / weight.sum().clamp(min=1e-6))


@torch.no_grad()
def measured(method: TokenIndexer, observed: list[Observed]) -> Tensor:
    """`[SHARES, 3]` over texts that it has not seen: what their distant pairs are worth, what those are worth that it
    keeps where each query has that share of them, and what the best ones are."""
    sums = torch.zeros(len(SHARES), 3, dtype=torch.float64)
    for text in observed:
        x, worth = tokens_of(text, method), worth_of(text).to(method.mean.device)
        far, scores = distant(method, len(x), x.device), method.scores(x, x)
        for place, share in enumerate(SHARES):
            wanted = (far.sum(-1, keepdim=True) * share).long()
            found = [worth, worth * best(scores, far, wanted), worth * best(worth, far, wanted)]
            sums[place] += torch.stack([part.sum(dtype=torch.float64) for part in found]).cpu()
    return sums


def worth_of(observed: Observed) -> Tensor:
    """`[T, T]`, the importance of each pair in all heads."""
    worth = (observed.share.float() * observed.total[..., None]).flatten(1)
    return torch.zeros(len(worth), len(worth)).scatter_add_(1, observed.keys.flatten(1).long(), worth)


def distant(method: TokenIndexer, length: int, device: torch.device) -> Tensor:
    """`[T, T]` bool, the pairs that it chooses from."""
    every = slice(0, length)
    visible = always_visible(Sequence.plain(1, length, device), every, length, method.window, method.sinks)[0]
    return causal(every, length, device) & ~visible
