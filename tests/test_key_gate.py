"""The gate on keys: its definition, cached decoding, its kernel, its fit and one threshold over all layers."""

import pytest
import torch
from builders import scored
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_sequence
from running import fitting, only_run, record_of, run, tiny

from focus_exp import attach
from focus_exp.attention.base import LayerShape
from focus_exp.attention.dense import reference_attention
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.attention.key_gate import GateTraining, KeyGate
from focus_exp.attention.selection import AttentionArgs, base_mask, local_mask
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.training.baseline_fits import find_threshold, fit_baseline, fit_gate, key_importance, later_queries
from focus_exp.training.focus_dual_fit.encoders import standardize
from focus_exp.training.focus_dual_fit.importance import Observation
from focus_exp.training.precision import choose_precision

WIDTH, T = 12, 96
NEAR = {"window": 5, "sinks": 2}


def make_gate(heads: int = 4, kv_heads: int = 2) -> KeyGate:
    method = KeyGate.create(LayerShape(WIDTH, heads, 8, 0, kv_heads), **NEAR)
    method.mean.normal_()
    method.scale.uniform_(0.5, 2)
    return method


@pytest.mark.parametrize("backend", ["masked", "cpu"])
@given(seed=st.integers(0, 1000), where=st.sampled_from(["plain", "left", "right"]))
@settings(max_examples=10)
@torch.no_grad()
def test_key_gate_keeps_its_definition(backend, seed, where):
    if backend == "cpu" and unavailable_reason() is not None:
        pytest.skip("no compiler")
    torch.manual_seed(seed)
    method, h, sequence = make_gate(), torch.randn(2, 40, WIDTH), random_sequence(where, 2, 40)
    method.backend = backend
    q, k, v = torch.randn(2, 4, 40, 8), *torch.randn(2, 2, 2, 40, 8)
    out = method.attend(q, k, v, method.route(h, sequence), sequence, AttentionArgs(0.3))
    score = (h - method.mean) / method.scale @ method.weight.T + method.bias  # (B, T, n)
    every = slice(0, 40)
    seen = base_mask(sequence, every, 40) | torch.eye(40, dtype=torch.bool)
    local = local_mask(sequence, every, 40, method.window, method.sinks)
    keep = seen[:, None] & (local[:, None] | (score > 0).transpose(1, 2)[:, :, None])
    s = (q.unflatten(1, (2, 2)) @ k[:, :, None].transpose(-1, -2) * 0.3).masked_fill(~keep[:, :, None], -torch.inf)
    expected = (s.softmax(-1) @ v[:, :, None]).flatten(1, 2)
    real = torch.ones(2, 40, dtype=torch.bool) if sequence.valid is None else sequence.valid
    torch.testing.assert_close(out.transpose(1, 2)[real], expected.transpose(1, 2)[real], atol=1e-5, rtol=1e-5)
    reference = reference_attention(q, k, v, method.route(h, sequence), sequence, AttentionArgs(0.3, **NEAR))
    torch.testing.assert_close(reference.transpose(1, 2)[real].float(), expected.transpose(1, 2)[real])


def planted(seed: int, scale: float = 1.0) -> Observation:
    """Two kinds of tokens; the keys of one are ten times as important, to every later query."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(2, (T,), generator=generator)
    hidden = torch.nn.functional.one_hot(kind, WIDTH) + 0.1 * torch.randn(T, WIDTH, generator=generator)
    distant = torch.arange(T)[:, None] - torch.arange(T) > NEAR["window"]
    importance = distant * torch.where(kind == 1, 1.0, 0.1) * scale
    total = importance.sum(-1)
    fractions = importance / total.clamp(min=1e-6)[:, None]
    keys = torch.arange(T).expand(T, T)
    return Observation(hidden.bfloat16(), torch.zeros(T, 1, 4).bfloat16(), *(
        x[:, None] for x in (keys.int(), fractions.half())), total[:, None].float())  # fmt: skip


def test_key_importance_sums_over_queries_of_each_head():
    keys = torch.tensor([[[0, 1], [1, 0]], [[1, 1], [0, 0]]]).int()
    fractions = torch.tensor([[[0.75, 0.25], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]]).half()
    observation = Observation(
        torch.zeros(2, 4), torch.zeros(2, 2, 4), keys, fractions, torch.tensor([[4.0, 2], [1, 6]])
    )
    assert key_importance(observation).tolist() == [[3.0, 7.0], [2.0, 1.0]]


def test_fit_gate_predicts_importance_per_later_query():
    torch.manual_seed(0)
    method = KeyGate.create(LayerShape(WIDTH, 2, 4, 0, 1), **NEAR)
    observations = [planted(seed, 3.0) for seed in range(4)]
    standardize(method, observations)
    fit_gate(
        method, observations, GateTraining(fit_steps=200, fit_learning_rate=0.02), torch.Generator().manual_seed(0)
    )
    hidden = (planted(9).hidden.float() - method.mean) / method.scale
    scores, kind = method.scores(hidden)[:, 0].exp(), planted(9).hidden[:, 1] > 0.5
    assert scores[kind].min() > 2 * scores[~kind].max()
    assert 1.5 < scores[kind].mean() < 4.5  # 3, less the decay of the weights


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), min_size=1, max_size=20), st.floats(0, 1))
def test_find_threshold_keeps_at_most_the_density(keys, density):
    scores, queries = (torch.tensor(x) for x in zip(*keys, strict=True))
    threshold = find_threshold(scores.float(), queries, density)
    kept = queries[scores > threshold].sum()
    assert kept <= density * queries.sum() + 1e-9
    assert density < 1 or kept == queries.sum()


def test_later_queries_counts_distant_pairs():
    counts = later_queries(make_gate(), 10)
    expected = [sum(i - j > NEAR["window"] for i in range(10)) if j >= NEAR["sinks"] else 0 for j in range(10)]
    assert counts.tolist() == expected


def test_fit_baseline_shares_a_threshold_and_its_fit_between_densities(tiny_model, tmp_path):
    sequences = list(torch.randint(256, (3, 64), generator=torch.Generator().manual_seed(0)))
    precision, kept, states = choose_precision("float32", "cpu", trains_base=False), [], []
    counts = []

    def observe(layer, method, selection, sequence):
        counts.append(method.count_pairs(selection, sequence))

    for density in (0.1, 0.5):
        torch.manual_seed(len(kept))
        model = attach(tiny_model("llama"), "key_gate", **NEAR)
        options = GateTraining(calibration_sequences=3, validation_sequences=1, fit_steps=6, density=density)
        fit_baseline(model, sequences, options, precision, tmp_path, seed=0)
        methods = list(attached_methods(model).values())
        counts.clear()
        with torch.no_grad(), observe_selections(model, observe):
            for tokens in sequences[:-1]:
                model(tokens[None])
        kept.append(sum(c.distant_kept for c in counts) / sum(c.distant for c in counts))
        states.append(torch.cat([method.weight.detach().flatten() for method in methods]))
        assert len({method.threshold.item() for method in methods}) == 1
    assert torch.equal(*states)
    assert len(list(tmp_path.glob("fits/*"))) == 1
    assert kept[0] < kept[1] <= 0.75 and kept[0] <= 0.35  # pruning changes the later layers' hidden states


def test_run_fits_the_gates_and_saves_an_adapter(tmp_path):
    options = ("attention=key_gate", "recipe=none", "attention.calibration_sequences=3", "attention.fit_steps=8")
    result = run(*fitting(*tiny(tmp_path), *options), "attention.validation_sequences=1")
    assert result.code == 0, result.err
    row = scored(record_of(tmp_path).measurements)[-1]
    assert (row.method, row.error) == ("key_gate", None)
    assert 0 < row.distant_density < 0.6
    assert (only_run(tmp_path) / "adapter").is_dir()
