"""Warm start from the model's attention, and calibration to groups of equal size."""

import pytest
import torch
from builders import copy_state, random_sequences
from test_dual_fit import FLOAT32, GROUPS, SINKS, WINDOW, T, distant_pairs
from torch import Tensor

from focus_exp import attach, set_routing
from focus_exp.fitting.focus import AttentionProbe, calibrate, warm_start
from focus_exp.models.methods import attached_methods, attention_modules, observe_selections, swap_methods


def focus(model, **options):
    torch.manual_seed(1)
    return attach(model, "focus", **{"groups": GROUPS, "window": WINDOW, "sinks": SINKS} | options)


def changed(model, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def group_sizes(model, sequences: list[Tensor]) -> Tensor:
    """Return the fraction of tokens in each group `(layers, K)`: by count with hard routing, else by mass."""
    sizes = torch.zeros(len(attached_methods(model)), GROUPS)

    def observe(layer, method, selection, sequence):
        sizes[layer] += (selection.assignment if selection.key_groups is None else selection.key_groups).sum((0, 1))

    with torch.no_grad(), observe_selections(model, observe):
        model(torch.stack(sequences))
    return sizes / sizes.sum(1, keepdim=True)


def attention_inside_groups(model, attentions, hidden) -> list[float]:
    """Compute sum_ij a_ij g_i . g_j / sum_ij a_ij over distant pairs, per layer."""
    fractions = []
    for layer, method in attached_methods(model).items():
        with torch.no_grad():
            logits = method.router(hidden[layer]).scores / method.temperature
            g = (logits + method.router.potential).softmax(-1)
        a = attentions[layer].mean(1) * distant_pairs()
        fractions.append(((a * (g @ g.transpose(1, 2))).sum() / a.sum()).item())
    return fractions


def test_warm_start_moves_attention_into_balanced_groups(tiny_model):
    sequences, hidden = random_sequences(4), []
    model = tiny_model("llama", attn_implementation="eager")
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append(kwargs["hidden_states"]), with_kwargs=True
        )
        for module in attention_modules(model).values()
    ]
    with torch.no_grad():
        attentions = model(torch.stack(sequences), output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    focus(model)
    at_random = attention_inside_groups(model, attentions, hidden)
    warm_start(model, sequences, 40, FLOAT32, seed=0)
    fitted = attention_inside_groups(model, attentions, hidden)
    assert all(after > before + 0.05 for before, after in zip(at_random, fitted, strict=True))
    # one group for all would hold all the mass: the gain must not come from there
    assert group_sizes(model, sequences).max() < 1.3 / GROUPS


def test_warm_start_changes_routers_only(tiny_model):
    model = focus(tiny_model("llama"))
    before = copy_state(model)
    warm_start(model, random_sequences(2), 3, FLOAT32, seed=0)
    routers = {name for name in before if ".focus." in name}
    assert changed(model, before) == routers and len(routers) == 6
    assert all(p.grad is None for p in model.parameters())
    assert not any(module.training for module in model.modules())
    assert all(type(method).__name__ == "Focus" for method in attached_methods(model).values())


def test_warm_start_depends_on_its_seed_only(tiny_model):
    states = []
    for seed in (0, 0, 1):
        model = focus(tiny_model("llama"))
        warm_start(model, random_sequences(4), 3, FLOAT32, seed)
        states.append(torch.cat([p.flatten() for m in attached_methods(model).values() for p in m.parameters()]))
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_attention_probe_records_full_attention(tiny_model, family):
    model, tokens = tiny_model(family), torch.stack(random_sequences(2))
    with torch.no_grad():
        expected = model(tokens).logits
        eager = tiny_model(family, attn_implementation="eager")(tokens, output_attentions=True).attentions
        focus(model)
        probes = {i: AttentionProbe(m.shape, WINDOW, SINKS) for i, m in attached_methods(model).items()}
        with swap_methods(model, dict(probes)):
            torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-4)
    for layer, probe in probes.items():
        assert torch.stack(probe.hidden).shape == (2, T, 64)
        mass = torch.stack(probe.mass).float()
        torch.testing.assert_close(mass, eager[layer].mean(1) * distant_pairs(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("normalize", "seed"), [(True, 0), (False, 1)])
def test_calibration_evens_hard_groups(tiny_model, normalize, seed):
    model = focus(tiny_model("llama", seed=seed), normalize=normalize, temperature=0.5)
    for method in attached_methods(model).values():
        method.router.potential[seed] = 30.0
    before, sequences = copy_state(model), random_sequences(8)
    assert (group_sizes(set_routing(model, hard=True), sequences).max(1).values > 0.6).all()
    calibrate(model, sequences, FLOAT32)
    assert group_sizes(set_routing(model, hard=True), sequences).max() < 1.2 / GROUPS
    assert group_sizes(model, random_sequences(8, seed=9)).max() < 1.6 / GROUPS
    assert {name.rsplit(".", 1)[1] for name in changed(model, before)} == {"potential"}


@pytest.mark.parametrize("assignment", ["sinkhorn", "softmax"])
def test_calibration_leaves_other_assignments_unchanged(tiny_model, assignment):
    model, tokens = focus(tiny_model("llama"), assignment=assignment), torch.stack(random_sequences(2))
    before, logits = copy_state(model), set_routing(model.eval(), hard=True)(tokens).logits
    calibrate(model, random_sequences(2), FLOAT32)
    # Sinkhorn's potential serves its causal counterpart
    assert {name.rsplit(".", 1)[1] for name in changed(model, before)} == (
        {"potential"} if assignment == "sinkhorn" else set()
    )
    assert torch.equal(model(tokens).logits, logits)
