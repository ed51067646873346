"""Fit of `focus_dual`: importance of pairs, encoders, budgets, cache."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from builders import copy_state, random_sequences, scored
from hypothesis import given, settings
from hypothesis import strategies as st
from running import fitting, only_run, record_of, router_steps, run, tiny, without_attention
from safetensors.torch import save_file
from torch import Tensor

from focus_exp import attach
from focus_exp.attention.base import LayerShape
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, base_mask, local_mask, top_k_groups
from focus_exp.config import FitConfig
from focus_exp.fitting import cache, focus_dual, importance
from focus_exp.fitting.cache import fit_attached, open_fit
from focus_exp.fitting.encoders import (
    FitSequence,
    fit_encoders,
    score_thresholds,
    standardize,
    standardized_tokens,
)
from focus_exp.fitting.focus_dual import (
    BudgetCurves,
    allocate_groups,
    measure_curves,
    pruned_change,
    rebalance,
    sum_neighbours,
    upper_hull,
)
from focus_exp.fitting.importance import (
    ImportanceProbe,
    LossProbe,
    Observation,
    fitted_methods,
    loss_changes,
    read_observations,
    record_observations,
)
from focus_exp.models.methods import attached_methods, observe_selections, swap_methods
from focus_exp.training.precision import choose_precision

T, WINDOW, SINKS, GROUPS = 64, 8, 2, 4
FLOAT32 = choose_precision("float32", "cpu", trains_base=False)
FITTED = ("distant_density_fit", "importance_lost_fraction", "groups_per_query")
FIT = FitConfig(sequences=3, validation_sequences=1, steps=8)
OPTIONS = {"groups": GROUPS, "top_k": 1, "window": WINDOW, "sinks": SINKS}


def attach_dual(model, **changes):
    torch.manual_seed(1)
    return attach(model, "focus_dual", **OPTIONS | changes)


def values(measurements, metric: str) -> list[float]:
    return [m.value for m in measurements if m.metric == metric]


def distant_pairs(length: int = T, window: int = WINDOW) -> Tensor:
    lag = torch.arange(length)[:, None] - torch.arange(length)
    return (lag > window) & (torch.arange(length) >= SINKS)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_loss_changes_equal_gradient_by_presence_of_a_pair(softcap, with_sinks):
    torch.manual_seed(0)
    heads, groups, length, size = 6, 2, 12, 8
    q, target = torch.randn(2, 1, heads, length, size, dtype=torch.float64)
    k, v = torch.randn(2, 1, groups, length, size, dtype=torch.float64)
    sink_logits = torch.randn(heads, dtype=torch.float64) if with_sinks else None
    visible = base_mask(Sequence.plain(1, length), slice(0, length), length)
    present = torch.ones(1, heads, length, length, dtype=torch.float64, requires_grad=True)
    s = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    e = s.exp() * visible[:, None] * present
    sink_mass = 0.0 if sink_logits is None else sink_logits.exp()[:, None, None]
    o = (e @ v.repeat_interleave(3, 1)) / (e.sum(-1, keepdim=True) + sink_mass)
    o.retain_grad()
    (o * target).sum().sin().backward()
    _, changes = loss_changes(
        q, k, v, o.detach(), o.grad, visible, AttentionArgs(0.5, softcap, sink_logits=sink_logits)
    )
    torch.testing.assert_close(changes.flatten(1, 2), -present.grad)


def test_loss_probe_records_all_pairs_in_row_blocks():
    recorded = []

    class Recorder(LossProbe):
        def record(self, k, changes):
            recorded.extend(changes)

    torch.manual_seed(0)
    length, probe = importance.ROWS + 20, Recorder(LayerShape(8, 4, 8, 0, 2), WINDOW, SINKS)
    q, k, v = (torch.randn(1, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    gradient, sequence, rows = torch.randn(1, 4, length, 8), Sequence.plain(1, length), slice(0, length)
    output = probe.attend(q, k, v, Selection(), sequence, AttentionArgs(0.5))
    (output * gradient).sum().backward()
    visible = base_mask(sequence, rows, length)
    distant = visible[0] & ~local_mask(sequence, rows, length, WINDOW, SINKS)[0]
    with torch.no_grad():
        expected = loss_changes(q, k, v, output, gradient, visible, AttentionArgs(0.5))
    assert [part.rows.stop for part in recorded] == [importance.ROWS, length]
    for part in recorded:
        assert torch.equal(part.distant, distant[part.rows, : part.rows.stop])
        for actual, whole in zip((part.attention, part.loss), expected, strict=True):
            torch.testing.assert_close(actual, whole[0][:, :, part.rows, : part.rows.stop])


@pytest.mark.parametrize("heads", [1, 2])
def test_pruned_change_equals_change_without_the_unread_groups(heads):
    torch.manual_seed(0)
    length, size, groups = 20, 8, 3
    q, gradient = torch.randn(2, 1, 4, length, size, dtype=torch.float64) / 2
    k, v = torch.randn(2, 1, 2, length, size, dtype=torch.float64) / 2
    visible = base_mask(Sequence.plain(1, length), slice(0, length), length)
    distant = ~local_mask(Sequence.plain(1, length), slice(0, length), length, WINDOW, SINKS)[0]
    members = torch.eye(groups, dtype=torch.float64)[torch.randint(groups, (heads, length))]
    order = torch.rand(heads, length, groups).argsort(-1)
    s = q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    full = s.masked_fill(~visible[:, None], float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    p, change = (x[0] * distant for x in loss_changes(q, k, v, full, gradient, visible, AttentionArgs(1.0)))
    by_head = members[:, None].expand(2 if heads > 1 else 1, -1, -1, -1)
    lost = pruned_change(change @ by_head, p @ by_head, order, heads)
    for count in range(groups + 1):
        read = torch.zeros(heads, length, groups, dtype=torch.float64).scatter(-1, order[..., :count], 1.0)
        kept = visible & (~distant | (read @ members.transpose(-1, -2) > 0))
        kept = kept.repeat_interleave(4 // heads, 0)[None]
        o = s.masked_fill(~kept, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
        expected = ((o - full) * gradient).sum(-1)[0].unflatten(0, (heads, -1)).sum(1)
        torch.testing.assert_close(lost[..., count], expected)


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_neighbouring_queries_are_summed(count):
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    sums = sum_neighbours(x, count)
    assert sums.shape == (2, -(-5 // count), 3)
    for number, part in enumerate(x.split(count, 1)):
        torch.testing.assert_close(sums[:, number], part.sum(1))


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])  # the latter has sliding layers
def test_observations_hold_distant_pairs_and_leave_the_model_unchanged(family, tiny_model, tmp_path):
    model = attach_dual(tiny_model(family), window=3)
    before = copy_state(model)
    (path,) = record_observations(model, fitted_methods(model), random_sequences(1), FLOAT32, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    totals = []
    for layer in fitted_methods(model):
        (observation,) = read_observations([path], layer)
        important = observation.fractions > 0
        lag = (torch.arange(T)[:, None, None] - observation.keys)[important]
        assert (lag > 3).all()
        assert (observation.keys[important] >= SINKS).all()
        assert (observation.fractions.float().sum(-1)[observation.total > 0] <= 1.01).all()
        totals.append(observation.total.sum().item())
    assert min(totals) >= 0 < max(totals)


def test_importance_probe_computes_the_base_attention(tiny_model):
    model, tokens = tiny_model("llama"), torch.stack(random_sequences(1))
    expected = model(tokens).logits
    attach_dual(model)
    probes = {i: ImportanceProbe(m) for i, m in attached_methods(model).items()}
    with torch.no_grad(), swap_methods(model, probes):
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_fit_to_attention_observes_attention_weights(tiny_model, tmp_path, monkeypatch):
    observed = []
    monkeypatch.setattr(focus_dual, "fit_encoders", lambda method, observations, *_: observed.append(observations[0]))
    sequences, model = random_sequences(3), tiny_model("llama")
    model.set_attn_implementation("eager")
    attentions = model(sequences[0][None], output_attentions=True).attentions
    fit_attached(attach_dual(model), sequences, replace(FIT, importance="attention"), FLOAT32, tmp_path, 0)
    for observation, attention in zip(observed, attentions, strict=True):
        expected = (attention[0] * distant_pairs()).unflatten(0, (observation.total.shape[1], -1)).sum(1)
        torch.testing.assert_close(observation.total.T, expected.sum(-1), rtol=1e-3, atol=1e-4)
        keys, fractions = observation.keys.long().transpose(0, 1), observation.fractions.float().transpose(0, 1)
        actual = fractions * observation.total.T[..., None]
        torch.testing.assert_close(actual, expected.gather(-1, keys) * (fractions > 0), rtol=1e-2, atol=1e-3)


def planted(sequences: int, seed: int) -> list[Observation]:
    """Make tokens of 4 kinds: kind a needs keys of kind a + 1 in head 0 and a + 2 in head 1; kind 0 ten times more."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.eye(16)[:4] * 4
    observations = []
    for _ in range(sequences):
        kind = torch.randint(4, (T,), generator=generator)
        hidden = kinds[kind] + 0.3 * torch.randn(T, 16, generator=generator)
        needed = torch.stack([(kind[None] == (kind[:, None] + shift) % 4) & distant_pairs() for shift in (1, 2)], 1)
        keys = needed.float().topk(16, -1).indices.int()
        counts = needed.float().gather(-1, keys.long())
        fractions = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        total = counts.sum(-1) * torch.where(kind == 0, 10, 1)[:, None]
        vectors = torch.randn(T, 2, 8, generator=generator)
        first = torch.zeros(T, dtype=torch.int32)
        observations.append(Observation(hidden.bfloat16(), vectors.bfloat16(), keys, fractions.half(), total, first))
    return observations


@pytest.fixture(scope="module")
def fitted() -> FocusDual:
    torch.manual_seed(0)
    method = FocusDual.create(LayerShape(16, 4, 8, 0, 2), **OPTIONS)
    observations = planted(24, seed=0)
    standardize(method, observations)
    fit_encoders(method, observations, 300, 0.005, torch.Generator().manual_seed(0))
    return method


def test_fit_encoders_ignores_the_means_of_two_kinds_of_text():
    shift = torch.zeros(16)
    shift[8:] = 20.0
    equal = {}
    for ignored in (0, 1):
        torch.manual_seed(0)
        method = FocusDual.create(LayerShape(16, 4, 8, 0, 2), **OPTIONS)
        observations = planted(24, seed=0)
        for observation in observations[::2]:
            observation.hidden += shift.bfloat16()
        standardize(method, observations)
        fit_encoders(method, observations, 300, 0.005, torch.Generator().manual_seed(0), ignored)
        groups = []
        for x in planted(4, seed=1):
            shifted = replace(x, hidden=x.hidden + shift.bfloat16())
            both = (standardized_tokens(observation, method)[None] for observation in (x, shifted))
            groups.append([method.key_encoder(tokens).argmax(-1) for tokens in both])
        equal[ignored] = sum((one == other).float().mean().item() for one, other in groups) / len(groups)
    assert equal[1] > 0.98 and equal[0] < 0.8


def test_fit_encoders_finds_planted_groups_of_even_size(fitted):
    for observation in planted(4, seed=1):
        sequence = FitSequence.of(observation, fitted)
        groups = top_k_groups(fitted.key_encoder(sequence.tokens)[0], 1).float()
        read = top_k_groups(fitted.query_encoder(sequence.tokens)[0], 1)
        importances = sequence.group_importance(groups)
        assert (importances * read).sum() / importances.sum() > 0.9
        assert groups.mean(1).max() < 0.45


def test_fit_encoders_predicts_the_total_importance_of_a_query(fitted):
    (observation,) = planted(1, seed=1)
    value = fitted.group_scores(FitSequence.of(observation, fitted).tokens)[0].logsumexp(-1)
    first = observation.hidden.float().argmax(-1) == 0
    assert (value[:, first].mean(-1) - value[:, ~first].mean(-1) > 1).all()


def test_group_importance_and_gradient_equal_a_dense_product():
    generator = torch.Generator().manual_seed(0)
    # some keys have no query, some queries no key
    keys, fractions = torch.randint(T // 2, (2, T, 5), generator=generator), torch.rand(2, T, 5, generator=generator)
    fractions[:, :WINDOW] = 0
    members = torch.randn(2, T, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    dense = torch.zeros(2, T, T, dtype=torch.float64).scatter_add(-1, keys, fractions.double())
    sequence = FitSequence(torch.empty(1, T, 4), keys, fractions, fractions.sum(-1))
    torch.testing.assert_close(sequence.group_importance(members), dense @ members)
    towards = torch.randn(2, T, 3, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((sequence.group_importance(members) * towards).sum(), members)
    torch.testing.assert_close(gradient, dense.transpose(-1, -2) @ towards)


def test_fit_with_one_encoder_trains_the_key_encoder(tiny_model, tmp_path):
    model = attach_dual(tiny_model("llama"), encoders=1)
    before = copy_state(model)
    rows, _ = fit_attached(model, random_sequences(3), FIT, FLOAT32, tmp_path, 0)
    lost = values(rows, "importance_lost_fraction")
    assert all(0 <= x <= 1 for x in lost)
    for method in fitted_methods(model).values():
        assert {name for name, _ in method.named_parameters()} == {"key_encoder.weight", "key_encoder.bias"}
    weights = [name for name in before if name.endswith("key_encoder.weight")]
    assert len(weights) == len(lost)
    assert not any(torch.equal(model.state_dict()[name], before[name]) for name in weights)


@pytest.mark.parametrize(
    ("family", "heads", "counts"),
    [*product(["llama"], ["kv", "layer"], ["head", "query", "pair"]), ("gemma3", "kv", "pair")],
)
def test_curves_count_the_pairs_of_the_attached_method(family, heads, counts, tiny_model):
    model = attach_dual(tiny_model(family), heads=heads, top_k=2, counts=counts, window=3)
    sequences, kept = random_sequences(2), {}
    for method in fitted_methods(model).values():
        method.worth.normal_()
        scores, _ = method.logits(torch.randn(1, T, len(method.mean)), torch.arange(T)[None])
        method.thresholds.copy_(score_thresholds(scores[0].detach()))

    def count(layer, method, selection, sequence):
        kept[layer] = method.count_pairs(selection, sequence)

    curves = measure_curves(model, fitted_methods(model), sequences, FLOAT32)
    with torch.no_grad(), observe_selections(model, count):
        model(torch.stack(sequences))
    for layer, method in fitted_methods(model).items():
        assert curves[layer].pairs.shape == curves[layer].lost.shape == (method.heads, GROUPS + 1)
        assert (curves[layer].lost[:, -1] == 0).all()
        assert (curves[layer].pairs[:, 0] == 0).all()
        assert curves[layer].pairs[:, -1].sum() == kept[layer].distant
    # hidden states of the first layer do not depend on what others read
    assert curves[0].pairs[:, 2].sum() == kept[0].distant_kept


@given(st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=30)
def test_allocation_keeps_the_budget_and_stays_on_the_hulls(seed, density):
    generator = torch.Generator().manual_seed(seed)
    curves = []
    for _ in range(3):
        steps = torch.rand(2, 2, 4, generator=generator, dtype=torch.float64)
        pairs, kept = (torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in steps)
        lost = kept[..., -1:] - kept
        curves.append(BudgetCurves(pairs, lost))
    reads = allocate_groups(curves, density)
    heads = list(product(range(3), range(2)))
    total = sum(curves[layer].pairs[head, -1] for layer, head in heads)
    assert sum(curves[layer].pairs[head, reads[layer][head]] for layer, head in heads) <= density * total + 1e-9
    for layer, head in heads:
        assert reads[layer][head] in upper_hull(curves[layer].pairs[head], -curves[layer].lost[head])
    assert allocate_groups(curves, 1.0) == [[4, 4]] * 3
    assert allocate_groups(curves, 0.0) == [[0, 0]] * 3


@pytest.mark.parametrize("counts", ["query", "pair"])
def test_fitted_queries_read_top_k_groups_on_average(counts, tiny_model, tmp_path):
    model, sequences, reads = attach_dual(tiny_model("llama"), counts=counts), random_sequences(3), {}
    fit_attached(model, sequences, FIT, FLOAT32, tmp_path, 0)

    def count(layer, method, selection, sequence):
        reads[layer] = selection.query_groups.float().sum(-1)

    with torch.no_grad(), observe_selections(model, count):
        model(torch.stack(sequences[:-1]))
    torch.testing.assert_close(reads[0].mean((0, 2)), torch.ones(reads[0].shape[1]), atol=0.02, rtol=0)
    assert reads[0].std() > 0


@pytest.mark.parametrize("changes", [{}, {"counts": "pair"}, {"encoders": 1}], ids=str)
def test_rebalance_evens_groups_and_resets_thresholds(changes, tiny_model):
    model, sequences = attach_dual(tiny_model("llama"), **changes), random_sequences(8)
    for method in fitted_methods(model).values():
        with torch.no_grad():
            method.key_encoder.bias[:, 0] += 1
    rebalance(model, sequences, FLOAT32)
    largest, reads = [], []

    def observe(layer, method, selection, sequence):
        largest.append(selection.key_groups.float().mean((0, 2)).max().item())
        reads.append(selection.query_groups.float().sum(-1).mean((0, 2)))

    with torch.no_grad(), observe_selections(model, observe):
        model(torch.stack(sequences))
    assert max(largest) < 0.3
    torch.testing.assert_close(reads[0], torch.ones_like(reads[0]), atol=0.02, rtol=0)


def test_rebalance_of_a_dense_budget_changes_nothing(tiny_model):
    model = attach_dual(tiny_model("llama"), top_k=GROUPS)
    before = copy_state(model)
    rebalance(model, random_sequences(1), FLOAT32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_interrupted_fit_resumes_and_budgets_share_it(tiny_model, tmp_path, monkeypatch):
    sequences, folder = random_sequences(3), tmp_path / "resumed"

    def fit_with(place=folder, density=0.5, precision=FLOAT32, seed=0):
        return fit_attached(attach_dual(tiny_model("llama"), density=density), sequences, FIT, precision, place, seed)

    expected, _ = fit_with(tmp_path / "uninterrupted")
    original, done = focus_dual.fit_encoders, []

    def interrupt(*arguments):
        done.append(arguments)
        if len(done) == 2:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(focus_dual, "fit_encoders", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit_with()
    assert len(list(folder.rglob("block-*"))) == 2 and len(list(folder.rglob("layer-*"))) == 1
    next(folder.rglob("block-00001.safetensors")).unlink()
    monkeypatch.setattr(focus_dual, "fit_encoders", lambda *arguments: done.append(original(*arguments)))
    again, seconds = fit_with()
    assert again == expected and seconds > 0
    densities = values(expected, "distant_density_fit")
    assert len(done) == len(densities) + 1  # the interrupted layer twice
    assert list(folder.rglob("block-*")) == []
    assert 0 < sum(densities) / len(densities) <= 0.5

    monkeypatch.setattr(cache, "record_observations", None)  # another budget needs no other fit
    rows, spent = fit_with(density=0.2)
    assert spent == seconds
    assert sum(values(rows, "distant_density_fit")) < sum(densities)
    for changed in ({"seed": 1}, {"precision": replace(FLOAT32, autocast=True)}):
        with pytest.raises(TypeError):
            fit_with(**changed)


def test_fit_under_autocast_and_beside_unrouted_layers(tiny_model, tmp_path):
    """Layers that are not fitted compute as the base does, whatever they prune later."""
    fits = []
    for number, budget in enumerate([["full", 2], ["window", 2]]):
        model = attach_dual(tiny_model("llama"), groups_per_layer=budget)
        precision = replace(FLOAT32, autocast=True)
        fit_attached(model, random_sequences(3), FIT, precision, tmp_path / str(number), seed=0)
        fits.append({name: x.clone() for name, x in attached_methods(model)[1].state_dict().items()})
    assert all(torch.equal(x, fits[1][name]) for name, x in fits[0].items())


def test_fit_cache_key_depends_on_the_arithmetic_of_the_base(tiny_model, tmp_path):
    def folder(**changes):
        model = attach_dual(tiny_model("llama"))
        vars(model.config).update(changes)
        with open_fit(model, random_sequences(1), FIT, FLOAT32, tmp_path, 0) as path:
            return path

    assert folder() == folder(_name_or_path="elsewhere", dtype=torch.bfloat16, use_cache=False)
    assert folder() != folder(rope_parameters={"rope_type": "default", "rope_theta": 500.0})


def test_run_fits_trains_by_distillation_and_saves_the_budget(tmp_path):
    settings = [
        *(
            "attention=focus_dual",
            "recipe.fit.sequences=3",
            "recipe.fit.validation_sequences=1",
            "recipe.fit.steps=4",
        ),
        *("attention.density=0.4", "attention.top_k=1", "attention.groups=6"),
    ]
    training = ["recipe=retrofit", router_steps(2), "recipe.phases.router.objective=distill"]
    result = run(*fitting(*tiny(tmp_path), *settings, *training))
    assert result.code == 0, result.err
    record = record_of(tmp_path / "runs")
    assert record.method["trainable_parameters"] > 0
    fitted = {name: values(record.measurements, name) for name in FITTED}
    assert [len(values) for values in fitted.values()] == [2, 2, 4]
    assert all(0 <= value <= 1 for value in fitted["distant_density_fit"])
    adapter = only_run(tmp_path / "runs") / "adapter"
    saved = json.loads((adapter / "focus_adapter.json").read_text(encoding="utf-8"))
    assert saved["options"]["groups_per_layer"] == np.reshape(fitted["groups_per_query"], (2, 2)).tolist()
    assert saved["tokens"] == record.tokens_seen > 2 * 2 * 2 * 32
    measured = run(*without_attention(tiny(tmp_path, "measured")), "job=evaluate", f"adapter={adapter}")
    assert measured.code == 0, measured.err
    losses = [
        {row.method: row.nll for row in scored(record_of(tmp_path / name).measurements)}
        for name in ("measured", "runs")
    ]
    assert losses[0]["focus_dual"] == pytest.approx(losses[1]["focus_dual"], abs=1e-6)
    assert run(*fitting(*tiny(tmp_path, "cached"), *settings, "recipe=none")).code == 0
    cached = record_of(tmp_path / "cached")
    assert cached.fit_seconds == record.fit_seconds > 0
    assert cached.train_seconds >= cached.fit_seconds - 1e-6
    assert record.train_seconds > record.fit_seconds


def test_fit_cached_by_an_earlier_version_is_read(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "fit.safetensors")
    tensors, seconds = importance.load_or_compute(tmp_path / "fit.safetensors", dict)
    assert torch.equal(tensors["x"], torch.ones(2)) and seconds == 0.0
