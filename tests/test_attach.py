"""A method on a Hugging Face model: causal, exact off, blind to padding, trainable, and gone when detached."""

import copy
from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, build
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from focus_exp import UserError, attach, detach, disable_method, freeze, is_causal, set_routing
from focus_exp.attention.selection import PairCounts, fold_heads
from focus_exp.models import hooks
from focus_exp.models.methods import attached_methods, observe_selections

TINY = {"window": 2, "sinks": 1}
EVERYTHING = {
    "focus": {"top_k": 4},
    "random_groups": {"top_k": 4},
    "focus_dual": {"top_k": 32},
    "window": {"window": 200},
}
families = pytest.mark.parametrize("family", FAMILIES)
ways = pytest.mark.parametrize("way", ["soft", "hard", "share", "window", "random_groups", "focus_dual"])


@pytest.fixture
def attached(tiny_model) -> Callable[..., PreTrainedModel]:
    """attached(family, way, dtype, **options): a tiny model with a mask that matters at 40 tokens."""

    def factory(family: str, way: str = "hard", dtype: torch.dtype = torch.float32, **options) -> PreTrainedModel:
        method = way if way in ("window", "random_groups", "focus_dual") else "focus"
        torch.manual_seed(1)
        model = attach(tiny_model(family, dtype), method, **TINY | options)
        return set_routing(model, hard=way != "soft", top_k=1, pair_rule="share" if way == "share" else "query_topk")

    return factory


def tokens_of(batch: int = 2, length: int = 40) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(length))


def logits_of(model: PreTrainedModel, tokens: Tensor, **kwargs) -> Tensor:
    with torch.no_grad():
        return model(tokens, **{"use_cache": False, **kwargs}).logits


def changed_after(model: PreTrainedModel, position: int) -> tuple[bool, bool]:
    """Whether other tokens from `position` on change any logit before it, and any after it."""
    tokens, other = tokens_of(), tokens_of()
    other[:, position:] = (other[:, position:] + 7) % 256
    changed = logits_of(model, tokens) != logits_of(model, other)
    return bool(changed[:, :position].any()), bool(changed[:, position:].any())


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@ways
def test_the_future_never_changes_the_past(attached, family, dtype, way):
    model = attached(family, way, dtype)
    assert is_causal(model)
    assert changed_after(model, 23) == (False, True)


@families
@pytest.mark.parametrize("way", ["soft", "hard"])
def test_sinkhorn_reads_the_future_and_says_so(attached, family, way):
    """Trap 1."""
    model = attached(family, way, assignment="sinkhorn")
    assert not is_causal(model)
    assert changed_after(model, 23) == (True, True)


def traces(model: PreTrainedModel) -> dict[str, object]:
    return {
        "names": list(model.state_dict()),
        "modules": [name for name, _ in model.named_modules()],
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "implementation": model.config._attn_implementation,
        "attributes": set(vars(model)),
    }


@families
@ways
def test_disabled_and_detached_it_is_the_base_model_bit_for_bit(tiny_model, attached, family, way):
    base, model = tiny_model(family), attached(family, way)
    tokens = tokens_of()
    expected = logits_of(base, tokens)
    assert (logits_of(model, tokens) - expected).abs().max() > 1e-3
    with disable_method(model):
        with disable_method(model):
            assert torch.equal(logits_of(model, tokens), expected)
        assert torch.equal(logits_of(model, tokens), expected)
    with pytest.raises(ZeroDivisionError), disable_method(model):
        raise ZeroDivisionError
    assert (logits_of(model, tokens) - expected).abs().max() > 1e-3
    detach(model)
    assert torch.equal(logits_of(model, tokens), expected)
    assert traces(model) == traces(base)


@families
@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_keeping_everything_is_the_base_model(tiny_model, family, method, hard):
    """By a window longer than the text, or by reaching all groups."""
    base, tokens = tiny_model(family), tokens_of()
    keeps_all = EVERYTHING[method] if hard else {"window": 200}
    model = set_routing(attach(tiny_model(family), method, **TINY | keeps_all), hard=hard)
    torch.testing.assert_close(logits_of(model, tokens), logits_of(base, tokens), atol=2e-5, rtol=1e-5)


@families
@ways
@pytest.mark.parametrize("side", ["left", "left without positions", "right"])
def test_a_padded_sequence_gives_the_logits_it_gives_alone(attached, family, way, side):
    if family == "gpt2" and side == "left without positions":
        pytest.skip("its positions are absolute: the base model needs them too")
    model = attached(family, way)
    lengths, longest = (40, 17, 1), 40
    batch, mask = torch.full((3, longest), 5), torch.zeros(3, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        inside = slice(longest - length, None) if "left" in side else slice(length)
        batch[row, inside], mask[row, inside] = tokens_of(1, length)[0], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if side == "left" else None
    together = logits_of(model, batch, attention_mask=mask, position_ids=positions)
    for row, length in enumerate(lengths):
        alone = logits_of(model, tokens_of(1, length))[0]
        torch.testing.assert_close(together[row, mask[row].bool()], alone, atol=1e-5, rtol=1e-5)


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_no_balance_and_counts_no_pair(attached, family, side):
    text, padding, found = tokens_of(1, 25), torch.full((1, 15), 5), []
    parts = [(padding, 0), (text, 1)] if side == "left" else [(text, 1), (padding, 0)]
    mask = torch.cat([torch.full_like(part, inside) for part, inside in parts], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = {"attention_mask": mask, "position_ids": positions}
    for tokens, options in ((text, {}), (torch.cat([part for part, _ in parts], 1), padded)):
        model, counts = attached(family).train(), []
        with observe_selections(
            model, lambda *args, counts=counts: counts.append(args[1].count_pairs(*args[2:]).total)
        ):
            model(tokens, **options)
        found.append((counts, torch.stack([m.router.potential for m in attached_methods(model).values()])))
    assert found[0][0] == found[1][0] and found[0][1].any()
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4)


@families
@ways
def test_packed_texts_do_not_see_each_other(attached, family, way):
    """Positions that start anew separate texts, each with sinks of its own."""
    model, first, second = attached(family, way), tokens_of(1, 19), tokens_of(1, 23)
    packed, positions = torch.cat([first, second], 1), torch.cat([torch.arange(19), torch.arange(23)])[None]
    together = logits_of(model, packed, position_ids=positions)
    alone = torch.cat([logits_of(model, first), logits_of(model, second)], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3"])
@ways
def test_pairs_are_kept_within_the_base_models_own_sliding_window(attached, family, way):
    model, counts, expected = attached(family, way), {}, {}

    def count(layer, method, selection, sequence):
        kinds = getattr(model.config, "layer_types", ["sliding_attention"] * 2)
        reach = 8 if kinds[layer] == "sliding_attention" else 40
        seen = [(i, j) for i in range(40) for j in range(max(0, i - reach + 1), i + 1)]
        distant = [(i, j) for i, j in seen if i - j > 2 and j >= 1]
        rows, _, heads = fold_heads(selection, sequence)
        kept = distant if way == "soft" else []
        if rows.query_groups is not None:
            of_heads = list(zip(rows.query_groups, rows.key_groups, strict=True))
            kept = [(i, j) for i, j in distant for asked, own in of_heads if (asked[i] & own[j]).any()]
        expected[layer] = PairCounts(heads * len(seen), heads * len(distant), len(kept))
        counts[layer] = method.count_pairs(selection, sequence)

    with observe_selections(model, count):
        logits_of(model, tokens_of(1))
    assert counts == expected and len(counts) == 2
    if family == "mistral":  # two layers of 8 see 14 tokens back, whatever the sinks
        tokens = tokens_of(1)
        changed = logits_of(model, tokens) != logits_of(model, tokens.masked_fill(torch.arange(40) == 0, 1))
        assert changed.any(-1).nonzero()[:, 1].max() <= 14


@families
def test_only_routers_are_trained_when_the_base_is_frozen(attached, family):
    model, tokens = attached(family, "soft").train(), tokens_of()
    base = {name: p.clone() for name, p in model.named_parameters() if ".focus." not in name}
    names = freeze(model)
    assert len(names) == 4 and all(".focus.router." in name for name in names)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(trained) == sorted(names)
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    logits_of(model, tokens)
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in trained.items()}
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in trained.values())
        optimizer.step()
        assert all(not torch.equal(p, before[name]) for name, p in trained.items())
    for name, p in model.named_parameters():
        assert name in trained or (p.grad is None and torch.equal(p, base[name]))

    assert len(freeze(model, "all")) == len(list(model.parameters()))
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@families
@pytest.mark.parametrize("assignment", ["balanced", "sinkhorn"])
def test_gradient_checkpointing_changes_neither_gradients_nor_balance(attached, family, assignment):
    results = []
    for checkpointing in (False, True):
        model = attached(family, "soft", assignment=assignment).train()
        freeze(model)
        if checkpointing:
            model.activation_checkpointing_enable()
        for tokens in (tokens_of(), tokens_of().flip(1)):  # two steps, so that the second starts from the first
            model(tokens, labels=tokens).loss.backward()
        pair = [model(x, labels=x).loss for x in (tokens_of(), tokens_of(2, 31))]  # as preferences are trained
        (pair[0] + 2 * pair[1]).backward()
        methods = attached_methods(model).values()
        results.append([p.grad for m in methods for p in m.parameters()] + [m.router.potential for m in methods])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "routing_dim", "groups", "count"),
    [
        ("gpt2_124m", 16, 4, 148_224),
        ("gpt2_124m", 32, 4, 296_448),
        ("gpt2_124m", 128, 4, 1_185_792),
        ("gpt2_124m", 768, 4, 7_114_752),
        ("mistral_7b", 16, 2, 2_098_176),
    ],
)
def test_trainable_parameters_are_as_many_as_in_the_paper(name, routing_dim, groups, count):
    with torch.device("meta"):
        model = build(name)
    attach(model, groups=groups, routing_dim=routing_dim)
    freeze(model)
    assert model.num_parameters(only_trainable=True) == count


@families
def test_generation_works_while_attached(attached, family):
    model, prompt = attached(family), tokens_of(1, 12)
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 256}
    by_hand = prompt
    for _ in range(6):
        by_hand = torch.cat([by_hand, logits_of(model, by_hand)[:, -1:].argmax(-1)], 1)
    for use_cache in (True, False):
        assert torch.equal(model.generate(prompt, use_cache=use_cache, **options), by_hand)
    with disable_method(model):
        cached = model.generate(prompt, use_cache=True, **options)
    assert torch.equal(cached, detach(model).generate(prompt, **options))


@families
def test_layers_without_a_method_behave_as_in_the_base_model(tiny_model, family):
    tokens = tokens_of()
    base = tiny_model(family)(tokens, output_hidden_states=True).hidden_states
    model = set_routing(attach(tiny_model(family), layers=[1], **TINY), hard=True)
    hidden = model(tokens, output_hidden_states=True).hidden_states
    assert list(attached_methods(model)) == [1]
    torch.testing.assert_close(hidden[1], base[1], atol=2e-5, rtol=1e-5)
    assert (hidden[2] - base[2]).abs().max() > 1e-3


def test_a_model_in_half_precision_keeps_its_routers_in_float32(attached):
    model = attached("llama").bfloat16()
    for method in attached_methods(model).values():
        assert {x.dtype for x in (*method.parameters(), method.router.potential)} == {torch.float32}
    assert logits_of(model, tokens_of()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["routing_transformer", "random_groups", "performer", "magicpig"])
def test_what_a_method_remembers_stays_in_float32_whenever_the_model_is_halved(tiny_model, name):
    model = attach(tiny_model("llama"), name).bfloat16()
    remembered = [x for method in attached_methods(model).values() for x in method.buffers()]
    assert {x.dtype for x in remembered if x.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
@pytest.mark.parametrize("way", ["hard", "focus_dual"])
def test_under_autocast_both_paths_compute_the_same(attached, family, way):
    """A base that is trained stays in float32, and with rotary positions q and k do too, beside v in bfloat16."""
    found = []
    for backend in ("masked", "cpu-flash"):
        model = set_routing(attached(family, way, layers=[0]), hard=True, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(tokens_of(), labels=tokens_of(), use_cache=False)
        out.loss.backward()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            step = model(tokens_of()[:, :1], past_key_values=model(tokens_of()).past_key_values)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append([out.logits.float().flatten(), gradient, step.logits.float().flatten()])
    for masked, sparse in zip(*found, strict=True):
        assert (masked - sparse).norm() < 0.05 * masked.norm()


def test_torch_compile_sees_one_graph(tiny_model):
    model = set_routing(attach(tiny_model("llama", num_hidden_layers=1), **TINY), hard=True, backend="cpu-flash")
    with torch.no_grad():
        explained = torch._dynamo.explain(model)(input_ids=tokens_of(1), use_cache=False)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_a_copy_is_attached_and_independent(tiny_model, attached):
    model, tokens = attached("llama"), tokens_of()
    expected, base = logits_of(model, tokens), logits_of(tiny_model("llama"), tokens)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, tokens), expected)
    set_routing(twin, hard=False)
    assert not torch.equal(logits_of(twin, tokens), expected) and torch.equal(logits_of(model, tokens), expected)
    detach(twin)
    assert torch.equal(logits_of(twin, tokens), base) and torch.equal(logits_of(model, tokens), expected)
    assert traces(twin) == traces(tiny_model("llama"))


def test_disabled_layers_call_nothing_of_ours(tiny_model, attached):
    model, tokens = attached("llama"), tokens_of()
    expected, base = logits_of(model, tokens), logits_of(tiny_model("llama"), tokens)
    for twin in (model, copy.deepcopy(model)):
        with disable_method(twin):
            with disable_method(twin):
                assert torch.equal(logits_of(twin, tokens), base)
            assert not any(module._forward_pre_hooks for module in twin.modules())
            assert torch.equal(logits_of(twin, tokens), base)
        assert torch.equal(logits_of(twin, tokens), expected)


def test_observers_may_be_nested(attached):
    model, outer, inner = attached("llama"), [], []
    with observe_selections(model, lambda layer, *_: outer.append(layer)):
        with observe_selections(model, lambda layer, *_: inner.append(layer)):
            logits_of(model, tokens_of())
        logits_of(model, tokens_of())
    logits_of(model, tokens_of())
    assert (outer, inner) == ([0, 1, 0, 1], [0, 1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "flash"}, "must be one of best_tokens, focus, focus_dual, .*'flash'"),
        ({"method": "window", "groups": 4}, "unknown option groups; use one of window, sinks"),
        ({"assignment": "sinkhron"}, "assignment.*sinkhron"),
        ({"gate": "linear"}, "gate.*linear"),
        ({"pair_rule": "any"}, "pair_rule.*any"),
        ({"window": -5}, r"window must be >= 0 \(got -5\)"),
        ({"window": "128"}, "window must be an integer .*'128'"),
        ({"sinks": True}, "sinks must be an integer .*True"),
        ({"groups": 1.5}, "groups must be an integer .*1.5"),
        ({"groups": 0}, "groups must be >= 1"),
        ({"top_k": 0}, "top_k must be >= 1"),
        ({"top_k": 5}, "top_k must be at most groups=4 .*5"),
        ({"temperature": 0.0}, "temperature must be finite and > 0"),
        ({"temperature": float("nan")}, "temperature must be .*nan"),
        ({"gate_threshold": 2.0}, "gate_threshold must be from 0 to 1 .*2.0"),
        ({"tempreature": 0.1}, "unknown option tempreature; did you mean temperature"),
        ({"layers": [1, 2]}, r"layers \[2\] do not exist; the model has layers 0 to 1"),
        ({"layers": 1}, "layers=1 is no list of layers"),
        ({"layers": []}, r"layers=\[\] is no list of layers"),
        ({"gate": "multiplicative"}, "gate_threshold must be 0 with gate=multiplicative .*0.5"),
    ],
)
def test_what_cannot_be_attached_is_refused_and_leaves_no_trace(tiny_model, wrong, message):
    model = tiny_model("llama")
    with pytest.raises(UserError, match=message):
        attach(model, **wrong)
    assert traces(model) == traces(tiny_model("llama"))


@pytest.mark.parametrize("top_k", [0, -1, 9, 1.5, True])
def test_top_k_is_a_number_of_the_groups(attached, top_k):
    with pytest.raises(UserError, match=f"top_k={top_k} is impossible; use 1 to 4"):
        set_routing(attached("llama"), hard=True, top_k=top_k)


def test_a_kernel_asked_for_by_name_that_cannot_serve_says_why(attached):
    model = set_routing(attached("gemma2"), hard=True, backend="cpu-flash")
    with pytest.raises(UserError, match="backend=cpu-flash .* has no softcap.*auto"):
        logits_of(model, tokens_of())


def test_another_attention_function_is_not_put_in_the_place_of_the_method(attached):
    model = attached("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="set to sdpa on a model with a method attached"):
        logits_of(model, tokens_of())
    with disable_method(model):
        base = logits_of(model, tokens_of())
    assert torch.equal(base, logits_of(detach(model), tokens_of()))


def test_hard_groups_stay_while_other_parts_train(tiny_model, attached):
    model = attached("llama")
    for method in attached_methods(model).values():
        method.eval().train = lambda mode=True: None
    balance = [method.router.potential.clone() for method in attached_methods(model).values()]
    expected = logits_of(model, tokens_of())
    assert torch.equal(logits_of(model.train(), tokens_of()), expected)
    assert all(map(torch.equal, balance, (method.router.potential for method in attached_methods(model).values())))


def test_what_save_pretrained_wrote_comes_back_with_the_method(attached, tmp_path):
    model = attached("llama")
    model.save_pretrained(tmp_path)
    other = LlamaForCausalLM.from_pretrained(tmp_path)
    attach(other, "focus", **model.focus_attachment.options)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    set_routing(other, hard=True)
    assert torch.equal(logits_of(other, tokens_of()), logits_of(model, tokens_of()))


def test_who_asks_for_attention_weights_is_told_that_there_are_none(attached, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(hooks.log, "warning_once", said.append)
    model = attached("llama")
    model(tokens_of())
    assert not said
    assert model(tokens_of(), output_attentions=True).attentions == () and "detach(model)" in said[0]


def test_attach_takes_a_causal_language_model_alone(tiny_model):
    llama = tiny_model("llama")
    for other in (llama.model, LlamaForSequenceClassification(llama.config), "llama"):
        with pytest.raises(UserError, match=f"with AutoModelForCausalLM, and this is a {type(other).__name__}$"):
            attach(other)
    with pytest.raises(UserError, match=r"this is a PeftModel; attach first, .* or pass model.get_base_model\(\)"):
        attach(get_peft_model(llama, LoraConfig(target_modules=["q_proj"])))


def test_attach_once_and_detach_only_what_is_attached(tiny_model, attached):
    with pytest.raises(UserError, match="already has"):
        attach(attached("llama"))
    with pytest.raises(UserError, match="'any' is not one of query_topk, share"):
        set_routing(attached("llama"), hard=True, pair_rule="any")
    with pytest.raises(UserError, match="hard must be true or false .*'yes'"):
        set_routing(attached("llama"), hard="yes")
    with pytest.raises(UserError, match="sparse_from must be an integer .*'a'"):
        set_routing(attached("llama"), hard=True, sparse_from="a")
    with pytest.raises(UserError, match="train='routers' is not one of router, lora, all"):
        freeze(attached("llama"), "routers")
    with pytest.raises(UserError, match="this is a str"):
        attach("gpt2")
    unrouted = (
        detach,
        freeze,
        lambda model: set_routing(model, hard=True),
        lambda model: disable_method(model).__enter__(),
    )
    for use in unrouted:
        with pytest.raises(UserError, match="no attention method attached"):
            use(tiny_model("llama"))
