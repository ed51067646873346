"""Fits of the token indexer and the block gate to the importance of pairs; test_key_gate.py has the gate on keys."""

import pytest
import torch
from builders import scored
from running import fitting, only_run, record_of, run, tiny

from focus_exp import attach
from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.block_gate import BlockGate
from focus_exp.attention.baselines.top_tokens import TokenIndexer, keep_largest
from focus_exp.attention.options import FitOptions
from focus_exp.attention.registry import METHODS
from focus_exp.attention.selection import Sequence
from focus_exp.models.methods import attached_methods
from focus_exp.training.baseline_fits import (
    FITS,
    block_mass,
    distant_pairs,
    fit_baseline,
    fit_block_gate,
    fit_indexer,
    pair_importance,
)
from focus_exp.training.focus_dual_fit.encoders import standardize, standardized_tokens
from focus_exp.training.focus_dual_fit.importance import Observation
from focus_exp.training.precision import choose_precision

WIDTH, T, KINDS = 16, 96, 6


def planted(seed: int) -> Observation:
    """Make tokens of several kinds; a query of one kind needs the keys of the next."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(KINDS, (T,), generator=generator)
    hidden = torch.nn.functional.one_hot(kind, WIDTH) + 0.1 * torch.randn(T, WIDTH, generator=generator)
    index = torch.arange(T)
    needed = (kind[None] == (kind[:, None] + 1) % KINDS) & (index[None] < index[:, None] - 4)
    keys = needed.float().topk(12, -1)
    fractions = keys.values / keys.values.sum(-1, keepdim=True).clamp(min=1)
    vectors, total = torch.zeros(T, 1, 4).bfloat16(), needed.any(-1)[:, None].float()
    return Observation(hidden.bfloat16(), vectors, keys.indices[:, None].int(), fractions[:, None].half(), total)


def kept_importance(method: TokenIndexer, observation: Observation, density: float) -> tuple[float, float]:
    """Return the importance that `method` and an ideal indexer keep."""
    x, importance = standardized_tokens(observation, method), pair_importance(observation)
    distant = distant_pairs(method, T, x.device)
    count = (distant.sum(-1, keepdim=True) * density).long()
    return tuple(
        (importance * keep_largest(scores, distant, count)).sum().item() for scores in (method.scores(x, x), importance)
    )


@torch.no_grad()
def test_fit_indexer_finds_planted_pairs():
    torch.manual_seed(0)
    method, validation = TokenIndexer.create(LayerShape(WIDTH, 2, 4, 0), size=8, window=4, sinks=0), planted(7)
    before, _ = kept_importance(method, validation, 0.2)
    observations, options = [planted(seed) for seed in range(4)], TokenIndexer.fit_options(fit_steps=150)
    standardize(method, observations)
    fit_indexer(method, observations, options, torch.Generator().manual_seed(0))
    after, ideal = kept_importance(method, validation, 0.2)
    assert ideal >= after > 0.95 * ideal
    assert after > 2 * before


def test_pair_importance_is_summed_over_heads():
    keys = torch.tensor([[[0, 1], [1, 0]]]).int().repeat(2, 1, 1)
    fractions = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).half().repeat(2, 1, 1)
    total = torch.tensor([[8.0, 2.0]]).repeat(2, 1)
    observation = Observation(torch.zeros(2, 4), torch.zeros(2, 2, 4), keys, fractions, total)
    assert pair_importance(observation).tolist() == [[7.0, 3.0]] * 2


def test_block_mass_sums_a_head_over_each_block():
    keys = torch.tensor([[[0, 3], [1, 2]]]).int().repeat(5, 1, 1)
    fractions = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).half().repeat(5, 1, 1)
    total = torch.tensor([[8.0, 2.0]]).repeat(5, 1)
    observation = Observation(torch.zeros(5, 4), torch.zeros(5, 2, 4), keys, fractions, total)
    assert block_mass(observation, 2)[:, 4].tolist() == [[6.0, 2.0, 0.0], [1.0, 1.0, 0.0]]


def planted_blocks(seed: int) -> Observation:
    """Make blocks of 8 tokens of one kind; a query of a kind needs the latest distant block of the next."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(3, (T // 8,), generator=generator).repeat_interleave(8)
    hidden = torch.nn.functional.one_hot(kind, WIDTH) + 0.1 * torch.randn(T, WIDTH, generator=generator)
    index = torch.arange(T)
    needed = (kind[None] == (kind[:, None] + 1) % 3) & (index[None] // 8 < index[:, None] // 8 - 1)
    keys = needed.float().topk(48, -1)
    fractions = keys.values / keys.values.sum(-1, keepdim=True).clamp(min=1)
    vectors, total = torch.zeros(T, 1, 4).bfloat16(), needed.any(-1)[:, None].float()
    return Observation(hidden.bfloat16(), vectors, keys.indices[:, None].int(), fractions[:, None].half(), total)


@torch.no_grad()
def test_fit_block_gate_finds_planted_blocks():
    torch.manual_seed(0)
    method = BlockGate.create(LayerShape(WIDTH, 1, 4, 0, 1), size=4, window=8, sinks=0, keys_per_block=8)
    observations, validation = [planted_blocks(seed) for seed in range(6)], planted_blocks(9)
    mass = block_mass(validation, 8)[0]

    def best_mass() -> float:
        selection = method.route(validation.hidden.float()[None], Sequence.plain(1, T))
        scores = (selection.queries @ selection.keys.transpose(-1, -2))[0, 0]
        begun = torch.arange(T // 8) < torch.arange(T)[:, None] // 8 - 1
        return mass.gather(1, scores.masked_fill(~begun, -torch.inf).argmax(-1, keepdim=True)).sum().item()

    before = best_mass()
    standardize(method, observations)
    fit_block_gate(method, observations, BlockGate.fit_options(fit_steps=150), torch.Generator().manual_seed(0))
    assert best_mass() > 0.95 * mass.amax(-1).sum().item()
    assert best_mass() > 1.5 * before


@pytest.mark.parametrize("name", ["token_indexer", "block_gate"])
def test_finished_fit_is_read(tiny_model, tmp_path, monkeypatch, name):
    options = FitOptions(calibration_sequences=3, validation_sequences=1, fit_steps=6)
    sequences = list(torch.randint(256, (3, 128), generator=torch.Generator().manual_seed(0)))
    precision = choose_precision("float32", "cpu", trains_base=False)

    def fit():
        torch.manual_seed(1)
        model = attach(tiny_model("llama"), name, window=8, sinks=2)
        fit_baseline(model, sequences, options, precision, tmp_path, seed=0)
        return [x for method in attached_methods(model).values() for x in method.state_dict().values()]

    expected = fit()
    monkeypatch.setitem(FITS, METHODS[name], (None, FITS[METHODS[name]][1]))
    assert all(map(torch.equal, fit(), expected))


@pytest.mark.parametrize("name", ["token_indexer", "block_gate"])
def test_run_fits_and_saves_an_adapter(tmp_path, name):
    options = (f"attention={name}", "recipe=none", "attention.calibration_sequences=3", "attention.fit_steps=8")
    settings = fitting(*tiny(tmp_path), *options)
    result = run(*settings, "attention.validation_sequences=1")
    assert result.code == 0, result.err
    row = scored(record_of(tmp_path).measurements)[-1]
    assert (row.method, row.error) == (name, None)
    assert 0.05 < row.distant_density <= 0.125
    assert (only_run(tmp_path) / "adapter").is_dir()
    assert run(*settings, "attention.validation_sequences=3").code == 2
