"""The token indexer is fitted to what pairs are worth: planted pairs are found, and an interrupted fit goes on."""

import pytest
import torch
from running import fitting, only_run, record_of, run, tiny

from focus_exp import attach
from focus_exp.attention.baselines.top_tokens import TokenIndexer
from focus_exp.attention.method import LayerShape
from focus_exp.models.methods import attached_methods
from focus_exp.training import indexer_fit
from focus_exp.training.importance import Observed
from focus_exp.training.indexer_fit import SHARES, fit_indexer, fit_indexers, measured, worth_of
from focus_exp.training.precision import choose_precision

WIDTH, T, KINDS = 16, 96, 6


def planted(seed: int) -> Observed:
    """A text whose tokens are of some kinds; what a query of one kind needs is the keys of the next."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(KINDS, (T,), generator=generator)
    hidden = torch.nn.functional.one_hot(kind, WIDTH) + 0.1 * torch.randn(T, WIDTH, generator=generator)
    index = torch.arange(T)
    wanted = (kind[None] == (kind[:, None] + 1) % KINDS) & (index[None] < index[:, None] - 4)
    keys = wanted.float().topk(12, -1)
    share = keys.values / keys.values.sum(-1, keepdim=True).clamp(min=1)
    return Observed(
        hidden.bfloat16(), torch.zeros(T, 1, 4).bfloat16(), keys.indices[:, None].int(), share[:, None].half(),
        wanted.any(-1)[:, None].float(),
    )  # fmt: skip


def test_planted_pairs_are_found():
    torch.manual_seed(0)
    method = TokenIndexer.of(LayerShape(WIDTH, 2, 4, 0), size=8, window=4, sinks=0)
    held_out = [planted(7)]
    before = measured(method, held_out)
    fit_indexer(method, [planted(seed) for seed in range(4)], 150, torch.Generator().manual_seed(0))
    after = measured(method, held_out)
    worth, kept, best = after[SHARES.index(0.2)].tolist()
    assert kept > 0.95 * best > 2 * before[SHARES.index(0.2), 1] and best <= worth * (1 + 1e-6)
    assert (after.diff(dim=0)[:, 1:] >= 0).all()


def test_the_worth_of_a_pair_is_summed_over_heads():
    keys = torch.tensor([[[0, 1], [1, 0]]]).int()
    share, total = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).half(), torch.tensor([[8.0, 2.0]])
    observed = Observed(
        torch.zeros(2, 4), torch.zeros(2, 2, 4), *(x.repeat(2, *[1] * (x.ndim - 1)) for x in (keys, share, total))
    )
    assert worth_of(observed).tolist() == [[7.0, 3.0]] * 2


def test_an_interrupted_fit_goes_on_and_a_finished_one_is_read(tiny_model, tmp_path, monkeypatch):
    options = TokenIndexer.fitting(calibration_sequences=3, validation_sequences=1, fit_steps=6)
    blocks = list(torch.randint(256, (3, 64), generator=torch.Generator().manual_seed(0)))
    precision = choose_precision("float32", "cpu", trains_base=False)

    def fitted(folder):
        torch.manual_seed(1)
        model = attach(tiny_model("llama"), "token_indexer", window=8, sinks=2)
        fit_indexers(model, blocks, options, precision, folder, seed=0)
        return [x for method in attached_methods(model).values() for x in method.state_dict().values()]

    whole, original, calls = fitted(tmp_path / "whole"), indexer_fit.fit_indexer, []

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(indexer_fit, "fit_indexer", stopping)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "parts")
    for _ in range(2):
        assert all(map(torch.equal, fitted(tmp_path / "parts"), whole))
    assert len(calls) == 3  # the first layer, the second twice


def test_a_run_fits_it_and_keeps_it_as_an_adapter(tmp_path):
    chosen = fitting(*tiny(tmp_path), "attention=token_indexer", "recipe=none")
    result = run(
        *chosen, "attention.calibration_sequences=3", "attention.validation_sequences=1", "attention.fit_steps=8"
    )
    assert result.code == 0, result.err
    assert "indexers fitted; " in result.out
    row = record_of(tmp_path).rows[-1]
    assert row.method == "token_indexer" and row.error is None and 0.05 < row.distant_pairs_kept <= 0.125
    assert (only_run(tmp_path) / "adapter").is_dir()
    refused = run(*chosen, "attention.calibration_sequences=3", "attention.validation_sequences=3")
    assert refused.code == 2 and "calibration_sequences=3 leaves no text to fit to" in refused.err
