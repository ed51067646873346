"""Fit of the token indexer to the importance of pairs."""

import torch
from builders import scored
from running import fitting, only_run, record_of, run, tiny

from focus_exp import attach
from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.top_tokens import TokenIndexer, keep_largest
from focus_exp.models.methods import attached_methods
from focus_exp.training import indexer_fit
from focus_exp.training.focus_dual_fit.encoders import standardized_tokens
from focus_exp.training.focus_dual_fit.importance import Observation
from focus_exp.training.indexer_fit import distant_pairs, fit_indexer, fit_indexers, pair_importance
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
    fit_indexer(method, [planted(seed) for seed in range(4)], 150, 0.005, torch.Generator().manual_seed(0))
    after, ideal = kept_importance(method, validation, 0.2)
    assert ideal >= after > 0.95 * ideal
    assert after > 2 * before


def test_pair_importance_is_summed_over_heads():
    keys = torch.tensor([[[0, 1], [1, 0]]]).int().repeat(2, 1, 1)
    fractions = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).half().repeat(2, 1, 1)
    total = torch.tensor([[8.0, 2.0]]).repeat(2, 1)
    observation = Observation(torch.zeros(2, 4), torch.zeros(2, 2, 4), keys, fractions, total)
    assert pair_importance(observation).tolist() == [[7.0, 3.0]] * 2


def test_finished_fit_is_read(tiny_model, tmp_path, monkeypatch):
    options = TokenIndexer.fit_options(calibration_sequences=3, validation_sequences=1, fit_steps=6)
    sequences = list(torch.randint(256, (3, 64), generator=torch.Generator().manual_seed(0)))
    precision = choose_precision("float32", "cpu", trains_base=False)

    def fit():
        torch.manual_seed(1)
        model = attach(tiny_model("llama"), "token_indexer", window=8, sinks=2)
        fit_indexers(model, sequences, options, precision, tmp_path, seed=0)
        return [x for method in attached_methods(model).values() for x in method.state_dict().values()]

    expected = fit()
    monkeypatch.setattr(indexer_fit, "fit_indexer", None)
    assert all(map(torch.equal, fit(), expected))


def test_run_fits_the_indexer_and_saves_an_adapter(tmp_path):
    options = ("attention=token_indexer", "recipe=none", "attention.calibration_sequences=3", "attention.fit_steps=8")
    settings = fitting(*tiny(tmp_path), *options)
    result = run(*settings, "attention.validation_sequences=1")
    assert result.code == 0, result.err
    row = scored(record_of(tmp_path).measurements)[-1]
    assert (row.method, row.error) == ("token_indexer", None)
    assert 0.05 < row.distant_density <= 0.125
    assert (only_run(tmp_path) / "adapter").is_dir()
    assert run(*settings, "attention.validation_sequences=3").code == 2
