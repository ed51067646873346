"""What pairs are worth, encoders that find it, budgets that spend pairs where they matter, and a fit that goes on."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from running import fitting, only_run, record_of, router_steps, run, tiny
from torch import Tensor

from focus_exp import attach
from focus_exp.attention.dual import FocusDual
from focus_exp.attention.method import LayerShape
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, always_visible, permitted, top_k_groups
from focus_exp.config_attention import DualConfig
from focus_exp.models.methods import attached_methods, observe_selections, swap_methods
from focus_exp.training import dual_fit, importance, kept_fit
from focus_exp.training.budget import allot, hull
from focus_exp.training.curves import Curves, lost, measure_curves
from focus_exp.training.dual_fit import duals_of, fit_dual, rebalance
from focus_exp.training.encoder_fit import Block, block_of, fit_encoders, thresholds
from focus_exp.training.importance import ImportanceProbe, LossProbe, Observed, changes_of_loss, observe, read
from focus_exp.training.precision import choose_precision

T, WINDOW, SINKS, GROUPS = 64, 8, 2, 4
FLOAT32 = choose_precision("float32", "cpu", trains_base=False)


def options(**changes) -> DualConfig:
    given = {
        "groups": GROUPS,
        "top_k": 1,
        "window": WINDOW,
        "sinks": SINKS,
        "calibration_sequences": 3,
        "validation_sequences": 1,
    }
    return DualConfig(name="focus_dual", method="focus_dual", **given | {"fit_steps": 8} | changes)


def dual(model, **changes):
    torch.manual_seed(1)
    given = {"groups": GROUPS, "top_k": 1, "window": WINDOW, "sinks": SINKS}
    return attach(model, "focus_dual", **given | changes)


def random_blocks(count: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randint(256, (count, T), generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_change_of_the_loss_is_its_gradient_by_the_weight_of_a_pair(softcap, with_sinks):
    torch.manual_seed(0)
    heads, groups, length, size = 6, 2, 12, 8
    q, target = torch.randn(2, 1, heads, length, size, dtype=torch.float64)
    k, v = torch.randn(2, 1, groups, length, size, dtype=torch.float64)
    sink_logits = torch.randn(heads, dtype=torch.float64) if with_sinks else None
    seen = permitted(Sequence.plain(1, length), slice(0, length), length)
    present = torch.ones(1, heads, length, length, dtype=torch.float64, requires_grad=True)  # of each pair in each head
    s = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    e = s.exp() * seen[:, None] * present
    rest = 0.0 if sink_logits is None else sink_logits.exp()[:, None, None]
    o = (e @ v.repeat_interleave(3, 1)) / (e.sum(-1, keepdim=True) + rest)
    o.retain_grad()
    (o * target).sum().sin().backward()
    _, found = changes_of_loss(q, k, v, o.grad, seen, AttentionArgs(0.5, softcap, sink_logits=sink_logits))
    torch.testing.assert_close(found.flatten(1, 2), -present.grad)


def test_a_probe_notes_every_distant_pair_some_queries_at_a_time():
    noted = []

    class Noting(LossProbe):
        def note(self, k, changes):
            noted.extend(changes)

    torch.manual_seed(0)
    length, probe = importance.ROWS + 20, Noting(LayerShape(8, 4, 8, 0, 2), WINDOW, SINKS)
    q, k, v = (torch.randn(1, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    gradient, sequence, every = torch.randn(1, 4, length, 8), Sequence.plain(1, length), slice(0, length)
    (probe.attend(q, k, v, Selection(), sequence, AttentionArgs(0.5)) * gradient).sum().backward()
    seen = permitted(sequence, every, length)
    far = seen[0] & ~always_visible(sequence, every, length, WINDOW, SINKS)[0]
    with torch.no_grad():
        whole = changes_of_loss(q, k, v, gradient, seen, AttentionArgs(0.5))
    for part in noted:
        assert torch.equal(part.distant, far[part.rows, : part.rows.stop])
        for found, wanted in zip((part.attention, part.loss), whole, strict=True):
            torch.testing.assert_close(found, (wanted[0] * far)[:, :, part.rows, : part.rows.stop])
    assert [part.rows.stop for part in noted] == [importance.ROWS, length]


@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_lost_is_the_change_of_the_loss_without_the_groups_that_are_not_read(heads):
    torch.manual_seed(0)
    length, size, groups = 20, 8, 3
    q, gradient = torch.randn(2, 1, 4, length, size, dtype=torch.float64) / 2
    k, v = torch.randn(2, 1, 2, length, size, dtype=torch.float64) / 2
    seen = permitted(Sequence.plain(1, length), slice(0, length), length)
    distant = ~always_visible(Sequence.plain(1, length), slice(0, length), length, WINDOW, SINKS)[0]
    members = torch.eye(groups, dtype=torch.float64)[torch.randint(groups, (heads, length))]
    order = torch.rand(heads, length, groups).argsort(-1)
    p, change = (x[0] * distant for x in changes_of_loss(q, k, v, gradient, seen, AttentionArgs(1.0)))
    of_heads = members[:, None].expand(2 if heads > 1 else 1, -1, -1, -1)
    found = lost(change @ of_heads, p @ of_heads, order, heads)
    best = lost(change @ of_heads, p @ of_heads, None, heads)
    s = q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    full = s.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    for count in range(groups + 1):
        read = torch.zeros(heads, length, groups, dtype=torch.float64).scatter(-1, order[..., :count], 1.0)
        keep = seen & (~distant | (read @ members.transpose(-1, -2) > 0))
        keep = keep.repeat_interleave(4 // heads, 0)[None]
        o = s.masked_fill(~keep, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
        changed = ((o - full) * gradient).sum(-1)[0].unflatten(0, (heads, -1)).sum(1).double().square().sum(1)
        torch.testing.assert_close(found[..., count].sum(1), changed)
    torch.testing.assert_close(best[..., [0, -1]], found[..., [0, -1]])


@pytest.mark.parametrize("family", FAMILIES)
def test_observing_leaves_the_model_as_it_is_and_sees_distant_pairs_alone(family, tiny_model, tmp_path):
    model = dual(tiny_model(family), window=3)  # of sliding layers, too
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (block,) = random_blocks(1)
    (path,) = observe(model, dict(duals_of(model)), [block], FLOAT32, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    seen = 0.0
    for layer in duals_of(model):
        (found,) = read([path], layer)
        lag = torch.arange(T)[:, None, None] - found.keys
        worth = found.share.float() > 0
        assert (lag.expand_as(worth)[worth] > 3).all() and (found.keys[worth] >= SINKS).all()
        share = found.share.float().sum(-1)
        assert (share[found.total > 0] <= 1.01).all() and (found.total >= 0).all()
        seen += found.total.sum().item()
    assert seen > 0


def planted(blocks: int, seed: int) -> list[Observed]:
    """Tokens of 4 kinds; in head 0 kind a asks for kind a + 1, in head 1 for a + 2, all else is worth nothing."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.eye(16)[:4] * 4
    found = []
    for _ in range(blocks):
        kind = torch.randint(4, (T,), generator=generator)
        hidden = kinds[kind] + 0.3 * torch.randn(T, 16, generator=generator)
        lag = torch.arange(T)[:, None] - torch.arange(T)
        distant = (lag > WINDOW) & (torch.arange(T) >= SINKS)
        wanted = torch.stack([(kind[None] == (kind[:, None] + shift) % 4) & distant for shift in (1, 2)], 1)
        keys = wanted.float().topk(16, -1).indices.int()
        share = wanted.float().gather(-1, keys.long())
        total = share.sum(-1)
        share = share / total.clamp(min=1)[..., None]
        vectors = torch.randn(T, 2, 8, generator=generator)
        found.append(Observed(hidden.bfloat16(), vectors.bfloat16(), keys, share.half(), total))
    return found


def test_worth_and_its_gradient_are_those_of_a_matrix():
    """Also of keys that no query has, and of queries without any."""
    generator = torch.Generator().manual_seed(0)
    keys, share = torch.randint(T // 2, (2, T, 5), generator=generator), torch.rand(2, T, 5, generator=generator)
    share[:, :WINDOW] = 0
    memberships = torch.randn(2, T, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    whole = torch.zeros(2, T, T, dtype=torch.float64).scatter_add(-1, keys, share.double())
    block = Block(torch.empty(1, T, 4), keys, share, share.sum(-1))
    torch.testing.assert_close(block.worth(memberships), whole @ memberships)
    towards = torch.randn(2, T, 3, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((block.worth(memberships) * towards).sum(), memberships)
    torch.testing.assert_close(gradient, whole.transpose(-1, -2) @ towards)


def test_a_fit_finds_what_was_planted_with_even_groups():
    method = FocusDual.of(LayerShape(16, 4, 8, 0, 2), groups=4, top_k=1, window=WINDOW, sinks=SINKS)
    fit_encoders(method, planted(24, seed=0), 600, torch.Generator().manual_seed(0))
    for observed_block in planted(4, seed=1):
        block = block_of(observed_block, method)
        groups = top_k_groups(method.key_encoder(block.tokens)[0], 1).float()
        asked = top_k_groups(method.query_encoder(block.tokens)[0], 1)
        assert ((block.worth(groups) * asked).sum() / block.worth(groups).sum()) > 0.9
        assert groups.mean(1).max() < 0.45


def test_what_the_keys_of_a_query_are_worth_is_expected_of_its_token():
    def weighed(blocks):
        for found in blocks:  # the first kind asks for ten times as much
            found.total = found.total * torch.where(found.hidden.float().argmax(-1) == 0, 10, 1)[:, None]
        return blocks

    method = FocusDual.of(LayerShape(16, 4, 8, 0, 2), groups=4, top_k=1, window=WINDOW, sinks=SINKS)
    fit_encoders(method, weighed(planted(24, seed=0)), 600, torch.Generator().manual_seed(0))
    (found,) = weighed(planted(1, seed=1))
    promises = method.promises(block_of(found, method).tokens)[0]
    first = found.hidden.float().argmax(-1) == 0
    worth = promises.logsumexp(-1)
    assert (worth[:, first].mean(-1) - worth[:, ~first].mean(-1) > 1).all()


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # the first layer of which sees 8 tokens
@pytest.mark.parametrize("heads", ["kv", "layer"])
@pytest.mark.parametrize("counts", ["head", "query", "pair"])
def test_curves_count_what_the_attached_method_keeps(family, heads, counts, tiny_model):
    model = dual(tiny_model(family), heads=heads, top_k=2, counts=counts, window=3)
    blocks, counts = random_blocks(2), {}
    for method in duals_of(model).values():
        method.worth.normal_()
        promises, _ = method.logits(torch.randn(1, T, len(method.mean)), torch.arange(T)[None])
        method.thresholds.copy_(thresholds(promises[0].detach()))

    def count(layer, method, selection, sequence):
        counts[layer] = method.count_pairs(selection, sequence)

    found = measure_curves(model, duals_of(model), blocks, FLOAT32)
    with torch.no_grad(), observe_selections(model, count):
        model(torch.stack(blocks))
    for layer, method in duals_of(model).items():
        curves = found[layer]
        assert curves.pairs.shape == curves.lost.shape == (method.heads, GROUPS + 1)
        assert (curves.lost[:, -1] == 0).all() and (curves.pairs[:, 0] == 0).all()
        assert curves.pairs[:, -1].sum() == counts[layer].distant
    # tokens of the first layer do not depend on what others read
    assert found[0].pairs[:, 2].sum() == counts[0].distant_kept


@given(st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=40)
def test_a_budget_is_never_exceeded_and_spends_where_a_pair_saves_most(seed, share):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(3):
        steps = torch.rand(2, 2, 4, generator=generator, dtype=torch.float64)
        pairs, kept = (torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in steps)
        lost = kept[..., -1:] - kept
        found.append(Curves(pairs, lost, lost))
    reads = allot(found, share)
    heads = list(product(range(3), range(2)))
    total = sum(found[layer].pairs[head, -1] for layer, head in heads)
    assert sum(found[layer].pairs[head, reads[layer][head]] for layer, head in heads) <= share * total + 1e-9
    assert all(reads[layer][head] in hull(found[layer].pairs[head], -found[layer].lost[head]) for layer, head in heads)
    assert allot(found, 1.0) == [[4, 4]] * 3
    assert allot(found, 0.0) == [[0, 0]] * 3


def test_a_fit_is_kept_by_what_decides_it_and_goes_on_where_it_stopped(tiny_model, tmp_path, monkeypatch):
    blocks = random_blocks(3)
    whole = fit_dual(dual(tiny_model("llama")), blocks, options(density=0.5), FLOAT32, tmp_path / "whole", 0).rows

    stopped, fitted = dual_fit.fit_encoders, []

    def stops(*args):
        if fitted:
            raise KeyboardInterrupt
        fitted.append(stopped(*args))

    monkeypatch.setattr(dual_fit, "fit_encoders", stops)
    with pytest.raises(KeyboardInterrupt):
        fit_dual(dual(tiny_model("llama")), blocks, options(density=0.5), FLOAT32, tmp_path / "again", 0)
    (torn,) = (tmp_path / "again").rglob("block-00001.safetensors")
    torn.unlink()
    (spent,) = (tmp_path / "again").rglob("seconds")
    spent.write_text("1000")
    monkeypatch.setattr(dual_fit, "fit_encoders", stopped)
    model = dual(tiny_model("llama"))
    assert fit_dual(model, blocks, options(density=0.5), FLOAT32, tmp_path / "again", 0).rows == whole
    assert not list((tmp_path / "again").rglob("block-*"))
    assert float(spent.read_text()) > 1000
    pairs = sum(row.pairs for row in whole) / len(whole)
    assert 0 < pairs <= 0.5

    monkeypatch.setattr(kept_fit, "observe", None)  # another budget needs no other fit
    seconds = {path: path.read_text() for path in (tmp_path / "again").rglob("seconds*")}
    other, spent = fit_dual(dual(tiny_model("llama")), blocks, options(density=0.2), FLOAT32, tmp_path / "again", 0)
    assert len(seconds) == 2 and spent == pytest.approx(sum(map(float, seconds.values())))
    assert sum(row.pairs for row in other) < sum(row.pairs for row in whole)
    for precision, seed in ((FLOAT32, 1), (replace(FLOAT32, autocast=True), 0)):
        with pytest.raises(TypeError):
            fit_dual(dual(tiny_model("llama")), blocks, options(density=0.2), precision, tmp_path / "again", seed)


def test_a_base_of_the_same_weights_and_other_arithmetic_has_a_fit_of_its_own(tiny_model, tmp_path):
    def folder(**changes):
        model = tiny_model("llama")
        vars(model.config).update(changes)
        with kept_fit.kept_fit(tmp_path, model, random_blocks(1), FLOAT32, []) as found:
            return found

    assert folder() == folder(_name_or_path="elsewhere", dtype=torch.bfloat16, use_cache=False)
    assert folder() != folder(rope_parameters={"rope_type": "default", "rope_theta": 500.0})


@pytest.mark.parametrize("counts", ["query", "pair"])
def test_fitted_queries_read_as_many_groups_on_average_as_they_are_to(counts, tiny_model, tmp_path):
    model, blocks, reads = dual(tiny_model("llama"), counts=counts), random_blocks(3), {}
    fit_dual(model, blocks, options(counts=counts), FLOAT32, tmp_path, 0)

    def count(layer, method, selection, sequence):
        reads[layer] = selection.query_groups.float().sum(-1)

    with torch.no_grad(), observe_selections(model, count):
        model(torch.stack(blocks[:-1]))
    # the tokens of the first layer are those that it was fitted to
    torch.testing.assert_close(reads[0].mean((0, 2)), torch.ones(reads[0].shape[1]), atol=0.02, rtol=0)
    assert reads[0].std() > 0


def test_one_encoder_is_fitted_to_what_its_keys_ask(tiny_model, tmp_path):
    model, blocks = dual(tiny_model("llama"), encoders=1), random_blocks(3)
    before = [method.key_encoder.weight.clone() for method in duals_of(model).values()]
    fits, _ = fit_dual(model, blocks, options(encoders=1), FLOAT32, tmp_path, 0)
    assert len(fits) == len(before) and all(0 <= fit.lost <= 1 for fit in fits)
    for method, weight in zip(duals_of(model).values(), before, strict=True):
        assert not torch.equal(method.key_encoder.weight, weight)
        assert {name for name, _ in method.named_parameters()} == {"key_encoder.weight", "key_encoder.bias"}


def test_a_fit_to_attention_sees_what_queries_attend_to(tiny_model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(dual_fit, "fit_encoders", lambda method, texts, *_: seen.append(texts[0]))
    blocks, model = random_blocks(3), tiny_model("llama")
    model.set_attn_implementation("eager")
    of_model = model(blocks[0][None], output_attentions=True).attentions
    fit_dual(dual(model), blocks, options(fit_to="attention"), FLOAT32, tmp_path, 0)
    lag = torch.arange(T)[:, None] - torch.arange(T)
    distant = (lag > WINDOW) & (torch.arange(T) >= SINKS)
    for found, whole in zip(seen, of_model, strict=True):
        wanted = (whole[0] * distant).unflatten(0, (found.total.shape[1], -1)).sum(1)
        torch.testing.assert_close(found.total.T, wanted.sum(-1), rtol=1e-3, atol=1e-4)
        keys, share = found.keys.long().transpose(0, 1), found.share.float().transpose(0, 1)
        attended = share * found.total.T[..., None]
        torch.testing.assert_close(attended, wanted.gather(-1, keys) * (share > 0), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("changes", [{}, {"counts": "pair"}, {"encoders": 1}])
def test_groups_that_training_has_moved_are_made_even_again(changes, tiny_model):
    model = dual(tiny_model("llama"), **changes)
    for method in duals_of(model).values():
        with torch.no_grad():
            method.key_encoder.bias[:, 0] += 1
    blocks = random_blocks(8)
    rebalance(model, blocks, FLOAT32)
    largest, reads = [], []

    def observe_sizes(layer, method, selection, sequence):
        largest.append(selection.key_groups.float().mean((0, 2)).max().item())
        reads.append(selection.query_groups.float().sum(-1).mean((0, 2)))

    with torch.no_grad(), observe_selections(model, observe_sizes):
        model(torch.stack(blocks))
    assert max(largest) < 0.3
    # in the first layer the tokens are the same
    torch.testing.assert_close(reads[0], torch.ones_like(reads[0]), atol=0.02, rtol=0)


def test_a_run_fits_trains_towards_the_base_and_leaves_an_adapter(tmp_path):
    settings = [
        "attention=focus_dual",
        "attention.calibration_sequences=3",
        "attention.validation_sequences=1",
        "attention.fit_steps=4",
    ]
    settings += [
        "attention.density=0.4",
        "attention.top_k=1",
        "attention.groups=6",
        router_steps(2),
        "recipe.phases.router.objective=distill",
    ]
    found = run(*fitting(*tiny(tmp_path), *settings, "recipe=retrofit"))
    assert found.code == 0, found.err
    assert "at best in as many groups" in found.out
    record = record_of(tmp_path / "runs")
    assert record.method["trainable_parameters"] > 0 and record.tokens_seen > 2 * 2 * 2 * 32
    assert len(record.fits) == 2 and all(0 <= fit.pairs <= 1 and fit.lost >= 0 for fit in record.fits)
    adapter = only_run(tmp_path / "runs") / "adapter"
    kept = json.loads((adapter / "focus_adapter.json").read_text(encoding="utf-8"))
    assert kept["options"]["groups_per_layer"] == [fit.reads for fit in record.fits]
    assert kept["tokens"] == record.tokens_seen
    measured = run(*fitting(*tiny(tmp_path, "measured"), *settings, "job=evaluate", f"adapter={adapter}"))
    assert measured.code == 0, measured.err
    rows = {row.method: row for row in record_of(tmp_path / "measured").rows}
    trained = {row.method: row for row in record.rows}
    assert rows["focus_dual"].nll == pytest.approx(trained["focus_dual"].nll, abs=1e-6)
    fitted = run(*fitting(*tiny(tmp_path, "fitted"), *(s for s in settings if "phases" not in s), "recipe=none"))
    assert fitted.code == 0, fitted.err
    again = record_of(tmp_path / "fitted")  # its fit came from the cache, and took what it took there
    assert again.fit_seconds == record.fit_seconds > 0
    assert again.train_seconds >= again.fit_seconds - 1e-6 and record.train_seconds > record.fit_seconds


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["attention.calibration_sequences=2", "attention.validation_sequences=2"], "leaves no text to fit to"),
        (["attention.density=0.2", "attention.calibration_sequences=0"], "leave one of them out"),
        (
            ["recipe.phases.router.objective=distill", "recipe.phases.router.train=all"],
            "use objective=lm, or train: router",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, settings, sentence):
    chosen = ["attention=focus_dual", "attention.top_k=1", "recipe=retrofit", router_steps(1), *settings]
    found = run(*fitting(*tiny(tmp_path), *chosen))
    assert found.code == 2
    assert sentence in found.err


def test_the_probe_is_the_base_models_own_attention(tiny_model):
    model = tiny_model("llama")
    tokens = torch.stack(random_blocks(1))
    expected = model(tokens).logits
    dual(model)
    probes = {i: ImportanceProbe(m.shape, m.window, m.sinks) for i, m in attached_methods(model).items()}
    with torch.no_grad(), swap_methods(model, probes):
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_where_a_query_reads_all_groups_there_is_nothing_to_make_even(tiny_model):
    model = dual(tiny_model("llama"), top_k=GROUPS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rebalance(model, random_blocks(1), FLOAT32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
