"""Fits of the token indexer, the block gate and the key gate to the importance of pairs."""

import pytest
import torch
from builders import random_sequences, scored
from hypothesis import given
from hypothesis import strategies as st
from running import fitting, only_run, record_of, run, tiny
from torch import Tensor

from focus_exp import attach, detach
from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.block_gate import BlockGate
from focus_exp.attention.baselines.key_gate import KeyGate
from focus_exp.attention.baselines.top_tokens import TokenIndexer, keep_largest
from focus_exp.attention.registry import METHODS
from focus_exp.config import FitConfig
from focus_exp.fitting.baselines import (
    BlockObservation,
    BlockProbe,
    distant_pairs,
    find_threshold,
    fit_block_gate,
    fit_gate,
    fit_indexer,
    key_importance,
    pair_importance,
)
from focus_exp.fitting.cache import FITS, fit_attached
from focus_exp.fitting.encoders import standardize, standardized_tokens
from focus_exp.fitting.importance import (
    Observation,
    fitted_methods,
    read_observations,
    record_observations,
)
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.training.precision import choose_precision

WIDTH, T, KINDS = 16, 96, 6
FIT = FitConfig(sequences=3, validation_sequences=1, steps=6)
NEAR = {"window": 5, "sinks": 2}
INDEX = torch.arange(T)
FLOAT32 = choose_precision("float32", "cpu", trains_base=False)
FITTED = pytest.mark.parametrize("name", ["token_indexer", "block_gate", "key_gate"])


def observe(kind: Tensor, importance: Tensor, generator: torch.Generator, most: int = T) -> Observation:
    """Make noisy hidden states of tokens of these kinds, and the `most` important keys of each query `(T, T)`."""
    hidden = torch.nn.functional.one_hot(kind, WIDTH) + 0.1 * torch.randn(T, WIDTH, generator=generator)
    total, keys = importance.sum(-1), importance.topk(most, -1)
    fractions = keys.values / total.clamp(min=1e-6)[:, None]
    vectors = torch.zeros(T, 1, 4).bfloat16()
    return Observation(
        hidden.bfloat16(), vectors, keys.indices[:, None].int(), fractions[:, None].half(), total[:, None].float(),
        torch.zeros(T, dtype=torch.int32),
    )  # fmt: skip


def planted_pairs(seed: int) -> Observation:
    """Make tokens of several kinds; a query of one kind needs the keys of the next."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(KINDS, (T,), generator=generator)
    needed = (kind[None] == (kind[:, None] + 1) % KINDS) & (INDEX[None] < INDEX[:, None] - 4)
    return observe(kind, needed / needed.sum(-1, keepdim=True).clamp(min=1), generator, most=12)


def planted_keys(seed: int) -> Observation:
    """Make two kinds of tokens; the keys of one are ten times as important, to every later query."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(2, (T,), generator=generator)
    distant = INDEX[:, None] - INDEX > NEAR["window"]
    return observe(kind, distant * torch.where(kind == 1, 3.0, 0.3), generator)


def kept_importance(method: TokenIndexer, observation: Observation, density: float) -> tuple[float, float]:
    """Return the importance that `method` and an ideal indexer keep."""
    x, importance = standardized_tokens(observation, method), pair_importance(observation)
    distant = distant_pairs(method, observation.first)
    count = (distant.sum(-1, keepdim=True) * density).long()
    return tuple(
        (importance * keep_largest(scores, distant, count)).sum().item() for scores in (method.scores(x, x), importance)
    )


@torch.no_grad()
def test_fit_indexer_finds_planted_pairs():
    torch.manual_seed(0)
    method, validation = TokenIndexer.create(LayerShape(WIDTH, 2, 4, 0), size=8, window=4, sinks=0), planted_pairs(7)
    before, _ = kept_importance(method, validation, 0.2)
    observations, options = [planted_pairs(seed) for seed in range(4)], FitConfig(steps=150)
    standardize(method, observations)
    fit_indexer(method, observations, options, torch.Generator().manual_seed(0))
    after, ideal = kept_importance(method, validation, 0.2)
    assert ideal >= after > 0.95 * ideal
    assert after > 2 * before


def test_importance_of_pairs_and_keys_equals_sums():
    keys = torch.tensor([[0, 3], [1, 2]]).int().repeat(5, 1, 1)
    fractions = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).half().repeat(5, 1, 1)
    total = torch.tensor([[8.0, 2.0]] * 4 + [[4.0, 6.0]])
    observation = Observation(torch.zeros(5, 4), torch.zeros(5, 2, 4), keys, fractions, total, torch.zeros(5))
    assert pair_importance(observation)[3:].tolist() == [[6, 1, 1, 2, 0], [3, 3, 3, 1, 0]]  # over heads
    assert key_importance(observation).T.tolist() == [[27, 0, 0, 9, 0], [0, 7, 7, 0, 0]]  # of a head, over queries


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])  # the latter has sliding layers
def test_block_probe_records_attention_by_block(family, tiny_model, tmp_path):
    model = attach(tiny_model(family), "block_gate", window=3, sinks=1, keys_per_block=5)
    methods, (tokens,) = fitted_methods(model), random_sequences(1, length=23)
    (path,) = record_observations(model, methods, [tokens], FLOAT32, tmp_path, BlockProbe)
    detach(model).set_attn_implementation("eager")
    attentions = model(tokens[None], output_attentions=True).attentions
    for layer, method in methods.items():
        (seen,) = read_observations([path], layer, BlockObservation)
        p, place = attentions[layer][0], torch.arange(23)
        distant = (p.sum(0) > 0) & (place[:, None] - place > 3) & (place >= 1)
        for block in range(5):
            keys = (place // 5 == block) & (place[:, None] // 5 > block)
            expected = (p * (distant & keys)).sum(-1).unflatten(0, (method.shape.kv_heads, -1))
            torch.testing.assert_close(seen.mass[..., block].float(), expected, atol=1e-3, rtol=1e-3)
            assert torch.equal(seen.candidates[:, block], (distant & keys).any(-1))


def test_fit_block_gate_finds_planted_blocks():
    """Queries need the block whose largest component is theirs; means do not tell, until the map is fitted."""
    torch.manual_seed(0)
    method = BlockGate.create(LayerShape(WIDTH, 2, 4, 0, 1), keys_per_block=8)
    observations = []
    for _ in range(6):
        queries = 3 * torch.nn.functional.one_hot(torch.randint(4, (1, 2, T)), 4).float()
        pooled = torch.randn(1, T // 8, 12)
        candidates = torch.arange(T // 8) < INDEX[:, None] // 8
        needed = (queries @ pooled[..., 4:8, None].squeeze(-1).transpose(-1, -2)).masked_fill(~candidates, -1e9)
        mass = torch.nn.functional.one_hot(needed.argmax(-1), T // 8) * candidates
        observations.append(BlockObservation(queries.half(), pooled.half(), mass.half(), candidates))

    def found() -> float:
        x = observations[-1]
        scores = x.queries.float() @ method.map_pooled(x.pooled.float())[:, None].transpose(-1, -2)
        best = scores.masked_fill(~x.candidates, -1e9).argmax(-1, keepdim=True)
        return (x.mass.float().gather(-1, best).sum() / x.mass.float().sum()).item()

    before = found()
    options = FitConfig(steps=150, learning_rate=0.05)
    fit_block_gate(method, observations[:-1], options, torch.Generator().manual_seed(0))
    assert before < 0.6 < 0.85 < found()


def test_fit_gate_predicts_importance_per_later_query():
    torch.manual_seed(0)
    method = KeyGate.create(LayerShape(WIDTH, 2, 4, 0, 1), **NEAR)
    observations = [planted_keys(seed) for seed in range(4)]
    standardize(method, observations)
    fit_gate(method, observations, FitConfig(steps=200, learning_rate=0.02), torch.Generator().manual_seed(0))
    hidden = (planted_keys(9).hidden.float() - method.mean) / method.scale
    scores, kind = method.scores(hidden)[:, 0].exp(), planted_keys(9).hidden[:, 1] > 0.5
    assert scores[kind].min() > 2 * scores[~kind].max()
    assert 1.5 < scores[kind].mean() < 4.5  # 3, less the decay of the weights


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), min_size=1, max_size=20), st.floats(0, 1))
def test_find_threshold_keeps_at_most_the_density(keys, density):
    scores, queries = (torch.tensor(x) for x in zip(*keys, strict=True))
    threshold = find_threshold(scores.float(), queries, density)
    kept = queries[scores > threshold].sum()
    assert kept <= density * queries.sum() + 1e-9
    assert density < 1 or kept == queries.sum()


@pytest.mark.parametrize("reach", [10, 8])
def test_distant_pairs_are_within_the_reach_of_the_base(reach):
    first = (torch.arange(10) - reach + 1).clamp(min=0)
    pairs = distant_pairs(KeyGate.create(LayerShape(WIDTH, 4, 8, 0, 2), **NEAR), first)
    expected = [
        [NEAR["window"] < i - j < reach and j >= NEAR["sinks"] for j in range(10)] for i in range(10)
    ]  # fmt: skip
    assert pairs.tolist() == expected


@pytest.mark.parametrize("name", ["key_gate", "block_gate", "token_indexer"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])  # the latter has sliding layers
def test_fitted_baselines_keep_their_density_of_the_calibration_text(family, name, tiny_model, tmp_path):
    torch.manual_seed(0)
    sequences, counts, density = random_sequences(3), [], 0.3
    model = attach(tiny_model(family), name, window=3, sinks=1, density=density)
    fit_attached(model, sequences, FIT, FLOAT32, tmp_path, seed=0)
    first = next(iter(attached_methods(model)))  # whose hidden states are those of the base
    with (
        torch.no_grad(),
        observe_selections(model, lambda _, method, *seen: counts.append((method, method.count_pairs(*seen)))),
    ):
        for tokens in sequences[:-1]:
            model(tokens[None])
    kept, distant = (sum(getattr(c, x) for _, c in counts) for x in ("distant_kept", "distant"))
    assert first == 0 and kept / distant == pytest.approx(density, abs=0.06)


def test_fit_attached_shares_a_threshold_and_its_fit_between_densities(tiny_model, tmp_path):
    sequences, kept, states, counts = random_sequences(3), [], [], []
    for density in (0.1, 0.5):
        torch.manual_seed(len(kept))
        model = attach(tiny_model("llama"), "key_gate", density=density, **NEAR)
        fit_attached(model, sequences, FIT, FLOAT32, tmp_path, seed=0)
        methods = list(attached_methods(model).values())
        counts.clear()
        with (
            torch.no_grad(),
            observe_selections(model, lambda _, method, *seen: counts.append(method.count_pairs(*seen))),
        ):
            for tokens in sequences[:-1]:
                model(tokens[None])
        kept.append(sum(c.distant_kept for c in counts) / sum(c.distant for c in counts))
        states.append(torch.cat([method.weight.detach().flatten() for method in methods]))
        assert len({method.threshold.item() for method in methods}) == 1
    assert torch.equal(*states)
    assert len(list(tmp_path.glob("fits/*"))) == 1
    assert kept[0] < kept[1] <= 0.75 and kept[0] <= 0.35  # pruning changes the later layers' hidden states


@FITTED
def test_finished_fit_is_read(tiny_model, tmp_path, monkeypatch, name):
    sequences = random_sequences(3, length=128)

    def fit():
        torch.manual_seed(1)
        model = attach(tiny_model("llama"), name, window=8, sinks=2)
        fit_attached(model, sequences, FIT, FLOAT32, tmp_path, seed=0)
        return [x for method in attached_methods(model).values() for x in method.state_dict().values()]

    expected = fit()
    monkeypatch.setitem(FITS, METHODS[name], None)
    assert all(map(torch.equal, fit(), expected))


@FITTED
def test_run_fits_and_saves_an_adapter(tmp_path, name):
    options = (f"attention={name}", "recipe=none", "recipe.fit.sequences=3", "recipe.fit.steps=8")
    settings = fitting(*tiny(tmp_path), *options)
    result = run(*settings, "recipe.fit.validation_sequences=1")
    assert result.code == 0, result.err
    row = scored(record_of(tmp_path).measurements)[-1]
    assert (row.method, row.error) == (name, None)
    assert 0 < row.distant_density <= (0.6 if name == "key_gate" else 0.125)
    assert (only_run(tmp_path) / "adapter").is_dir()
    assert run(*settings, "recipe.fit.validation_sequences=3").code == 2
