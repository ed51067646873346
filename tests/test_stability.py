"""Against one group that swallows all tokens: what was tried does what it says, and what happens is seen and told."""

import copy
import math

import pytest
import torch
import wandb
from builders import scored, write_comparison
from hypothesis import given, settings
from hypothesis import strategies as st
from running import record_of, router_steps, run, tiny
from test_training import ALL, FLOAT32, ROUTER, T, blocks_of, focus, train

from focus_exp import config as schema
from focus_exp.attention.router import balance_loss, entropy_loss, follow_means, kmeans
from focus_exp.attention.selection import Sequence
from focus_exp.models.methods import attached_methods
from focus_exp.reporting.frame import filter_rows, to_rows
from focus_exp.reporting.load import load_run
from focus_exp.results.metrics import read_metrics
from focus_exp.training import callbacks
from focus_exp.training.callbacks import PROBES, probe_tokens, route_tokens, router_statistics
from focus_exp.training.module import auxiliary_losses

K = 4
LOSSES = {"balance_loss": 0.5, "entropy_loss": 0.1}
RECLUSTER = {"centroid_update": "recluster", "recluster_every": 2}
FOR_THE_METHOD = (*LOSSES, "detach_inputs", "centroid_update", "assignment", "train_with")


def attached(model, options):
    return focus(model, **{"assignment": "softmax"} | {k: v for k, v in options.items() if k in FOR_THE_METHOD})


def states(model) -> torch.Tensor:
    """All that routers hold, buffers too."""
    return torch.cat([t.flatten() for m in attached_methods(model).values() for t in m.state_dict().values()])


# the losses

distributions = st.integers(2, 8).flatmap(
    lambda k: st.lists(st.lists(st.floats(-20, 20), min_size=k, max_size=k), min_size=1, max_size=12)
)


@given(distributions)
def test_balance_losses_are_minimal_at_balance_and_certainty(logits):
    g = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    k = g.shape[-1]
    assert -1e-12 <= balance_loss(g) <= math.log(k) + 1e-12 and 0 <= entropy_loss(g) <= math.log(k) + 1e-12
    circled = torch.stack([g.roll(shift, -1) for shift in range(k)]).flatten(0, 1)  # every group has as much mass
    assert balance_loss(circled).item() == pytest.approx(0, abs=1e-12)
    assert entropy_loss(circled).item() == pytest.approx(entropy_loss(g).item())


def test_entropy_loss_certain_tokens_is_zero_with_finite_gradient():
    certain = torch.eye(K).repeat(3, 1).requires_grad_()
    assert entropy_loss(certain).item() == 0 and balance_loss(certain).item() == pytest.approx(0, abs=1e-6)
    assert balance_loss(torch.eye(K)[:1]).item() == pytest.approx(math.log(K))
    assert entropy_loss(torch.full((5, K), 1 / K)).item() == pytest.approx(math.log(K))
    (entropy_loss(certain) + balance_loss(certain)).backward()
    assert torch.isfinite(certain.grad).all()


@pytest.mark.parametrize("valid", [None, torch.arange(T).expand(2, T) < T - 5])
def test_auxiliary_losses_are_weighted_without_padding(tiny_model, valid):
    method = attached_methods(attached(tiny_model("llama"), LOSSES))[0].train()
    h = torch.randn(2, T, method.shape.width)
    sequence = Sequence(start=torch.zeros(2, T, dtype=torch.long), valid=valid)
    method.losses = []
    g = method.assign(h, sequence)
    real = g.flatten(0, 1) if valid is None else g[valid]
    expected = LOSSES["balance_loss"] * balance_loss(real) + LOSSES["entropy_loss"] * entropy_loss(real)
    torch.testing.assert_close(method.losses, [expected])
    method.eval().assign(h, sequence)
    assert len(method.losses) == 1


def test_balance_loss_training_balances_groups(tiny_model, tmp_path):
    imbalance = []
    for weight in (0.0, 20.0):
        model = attached(tiny_model("llama"), {"balance_loss": weight})
        phase = schema.PhaseConfig(trainable="router", steps=25, learning_rate=3e-2)
        train(model, phase, tmp_path / str(weight))
        assert all(method.losses is None for method in attached_methods(model).values())
        copy.deepcopy(model)  # which a tensor with a graph would refuse
        assignments = route_tokens(model, probe_tokens(blocks_of(0)), FLOAT32)
        imbalance.append(torch.stack([balance_loss(g) for g in assignments]).mean().item())
    assert imbalance[1] < imbalance[0] / 3


def test_logged_loss_excludes_auxiliary_losses(tiny_model, tmp_path):
    losses = []
    for options in ({}, LOSSES):
        model = attached(tiny_model("llama"), options)
        losses.append(train(model, ROUTER, tmp_path / str(len(losses)), options))
        with auxiliary_losses(model) as gathered:
            model.train()(input_ids=torch.zeros(1, T, dtype=torch.long), use_cache=False)
        assert len(gathered) == (len(attached_methods(model)) if options else 0)
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]


@pytest.mark.parametrize("detached", [False, True])
def test_detach_inputs_stops_router_gradient(tiny_model, detached):
    method = attached_methods(attached(tiny_model("llama"), {"detach_inputs": detached}))[0].train()
    h = torch.randn(1, T, method.shape.width, requires_grad=True)
    method.assign(h, Sequence.plain(1, T)).square().sum().backward()
    assert (h.grad is None) == detached
    assert all(p.grad.abs().max() > 0 for p in method.router.parameters())


def test_follow_means_moves_to_group_means():
    tokens = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    before = torch.tensor([[1.0, 1.0], [0.0, 1.0], [9.0, 9.0]])
    groups = torch.tensor([0, 0, 1])
    means = torch.tensor([[2.0, 0.0], [0.0, 5.0], [9.0, 9.0]])  # the last has no token, and stays
    torch.testing.assert_close(follow_means(before, tokens, groups, 0.0), means)
    torch.testing.assert_close(follow_means(before, tokens, groups, 0.75), 0.75 * before + 0.25 * means)
    assert torch.equal(follow_means(before, tokens, groups, 1.0), before)


@given(st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=30, derandomize=True)  # one seed in thousands starts twice in one cluster
def test_kmeans_finds_planted_clusters(groups, seed):
    generator = torch.Generator().manual_seed(seed)
    centres = 100 * torch.eye(8)[torch.randperm(8, generator=generator)[:groups]]
    tokens = centres.repeat(9, 1) + torch.randn(9 * groups, 8, generator=generator)
    found = kmeans(tokens, groups, seed)
    assert torch.cdist(centres, found).amin(-1).max() < 4 and torch.equal(found, kmeans(tokens, groups, seed))


def test_kmeans_fewer_tokens_than_groups_succeeds():
    assert kmeans(torch.ones(2, 3), 4, seed=0).tolist() == [[1.0] * 3] * 4


def seen_by(model, monkeypatch) -> dict[int, list[torch.Tensor]]:
    """Layer -> the hidden states of its training passes."""
    seen: dict[int, list[torch.Tensor]] = {index: [] for index in attached_methods(model)}
    for index, method in attached_methods(model).items():
        whole = method.assign

        def assign(h, sequence, index=index, whole=whole):
            seen[index].append(h.detach().clone())
            return whole(h, sequence)

        monkeypatch.setattr(method, "assign", assign)
    return seen


def test_ema_centroids_follow_means_of_a_step(tiny_model, tmp_path, monkeypatch):
    options = {"centroid_update": "ema", "centroid_decay": 0.25}
    model = attached(tiny_model("llama"), options)
    methods = attached_methods(model)
    assert all([name for name, _ in m.router.named_parameters()] == ["projection"] for m in methods.values())
    before, seen = copy.deepcopy(methods), seen_by(model, monkeypatch)
    one = schema.PhaseConfig(trainable="router", steps=1, learning_rate=1e-9)
    train(model, one, tmp_path, options, batch_size=2, accumulate=2)
    for index, method in methods.items():
        router = before[index].router
        tokens = torch.cat([router.project(h).flatten(0, 1) for h in seen[index]])
        assert len(tokens) == 4 * T
        groups = router.compare(tokens).argmax(-1)
        means = [tokens[groups == k].mean(0) if (groups == k).any() else router.centroids[k] for k in range(K)]
        torch.testing.assert_close(
            method.router.centroids, 0.25 * router.centroids + 0.75 * torch.stack(means), rtol=0, atol=1e-5
        )
        assert method.projected is None


def test_recluster_runs_every_n_steps(tiny_model, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(callbacks, "kmeans", lambda *given: called.append(given) or kmeans(*given))
    options = {"centroid_update": "recluster", "recluster_every": 2}
    model = attached(tiny_model("llama"), options)
    train(model, schema.PhaseConfig(trainable="router", steps=6, learning_rate=1e-9), tmp_path, options, accumulate=2)
    assert len(called) == 2 * len(attached_methods(model))  # after steps 2 and 4
    assert {len(tokens) for tokens, _, _ in called} == {2 * T} and len({seed for _, _, seed in called}) == len(called)
    last = kmeans(*called[-1])
    centroids = attached_methods(model)[1].router.centroids.detach()
    nearest = torch.nn.functional.cosine_similarity(last, centroids)
    torch.testing.assert_close(nearest, torch.ones(K), rtol=0, atol=1e-4)
    assert torch.allclose(centroids.norm(dim=-1), centroids.norm(dim=-1).mean())  # scores are dot products


@pytest.mark.parametrize(("phase", "options"), [(ROUTER, RECLUSTER), (ALL, LOSSES | {"detach_inputs": True})])
def test_checkpointing_keeps_losses_and_centroids(tiny_model, tmp_path, phase, options):
    results = []
    for checkpointing in (False, True):
        model = attached(tiny_model("llama"), options)
        before = states(model)
        losses = train(model, phase, tmp_path / str(checkpointing), options, gradient_checkpointing=checkpointing)
        assert (states(model) - before).abs().max() > 1e-3
        results.append((torch.tensor(losses), states(model)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("phase", "options"), [(ROUTER, {"assignment": "balanced"}), (ROUTER, RECLUSTER), (ALL, {"train_with": "hard"})]
)
def test_probe_keeps_training_unchanged(tiny_model, tmp_path, phase, options):
    results = []
    for probed in (None, probe_tokens(blocks_of(1))):
        model = attached(tiny_model("gpt2", resid_pdrop=0.2), options)
        folder = tmp_path / str(probed is None)
        losses = train(model, phase, folder, options, probed, probe_every=1, gradient_checkpointing=True)
        results.append((losses, {name: tensor for name, tensor in model.state_dict().items()}))
    assert (folder / PROBES).exists() and len(read_metrics(folder / PROBES)) == phase.steps + 1
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


@pytest.mark.parametrize(("every", "steps"), [(None, [0, 1, 2, 3, 4]), (3, [0, 3, 4]), (9, [0, 4]), (0, [])])
def test_probe_runs_every_n_steps(tiny_model, tmp_path, every, steps):
    train(focus(tiny_model("llama")), ROUTER, tmp_path, {}, probe_tokens(blocks_of(1)), probe_every=every, accumulate=2)
    lines = read_metrics(tmp_path / PROBES)
    assert [line["step"] for line in lines] == steps
    assert [line["assignment_overlap"] is None for line in lines] == [step == 0 for step in steps]


def test_probe_values_equal_definition():
    first = torch.tensor([[0, 0, 0, 1] * 50, [0, 1, 2, 3] * 50])
    second = torch.tensor([[0, 0, 0, 2] * 50, [1, 2, 3, 0] * 50])
    onehot = [torch.nn.functional.one_hot(groups, K).float() for groups in second]
    soft = [0.6 * g + 0.1 for g in onehot]
    found = router_statistics(soft, second, first)
    assert found["dominance"] == pytest.approx((0.75 + 0.25) / 2)
    assert found["dead_groups"] == 1
    assert found["assignment_overlap"] == pytest.approx(0.75 / 2)
    assert found["confidence"] == pytest.approx(0.7)
    assert router_statistics(soft, second, None)["assignment_overlap"] is None


# runs

CADENCE = (
    *("trainer.checkpoint_every=3", "trainer.probe_every=2", "eval.controls=false", "eval.max_sequences=2"),
    *("data.seq_len=16", router_steps(4)),
)
TWO_PHASES = ("recipe=finetune", "recipe.phases.everything.steps=5", *CADENCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stability")


@pytest.fixture(scope="module")
def logged():
    """What the run of `whole` sends to W&B."""
    return []


@pytest.fixture(scope="module")
def whole(folder, logged):
    live = wandb.init(mode="disabled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wandb, "init", lambda **options: live)
        patch.setattr(live, "log", lambda values, *_, **__: logged.append(values))
        assert run(*tiny(folder, "whole"), *TWO_PHASES, "logger.wandb=offline").code == 0
    return folder / "whole"


def test_loggers_continue_steps_across_phases(whole, logged):
    trained, probed = ([line for line in logged if key in line] for key in ("train/loss", "probe/dominance"))
    assert [(line["train/phase"], line["trainer/global_step"]) for line in trained] == [
        *(("router", step) for step in range(1, 5)), *(("everything", step) for step in range(5, 10)),
    ]  # fmt: skip
    assert {line["train/tokens"] / line["trainer/global_step"] for line in trained} == {2 * 2 * 16}
    assert [line["trainer/global_step"] for line in probed] == [0, 2, 4, 4, 6, 8, 9]
    assert any(isinstance(value, wandb.Table) for line in logged for value in line.values())


def test_phase_evaluation_equals_run_end(folder, whole):
    assert run(*tiny(folder, "alone"), *CADENCE).code == 0
    alone, both = (record_of(path).measurements for path in (folder / "alone", whole))
    for phase, run_end in (("router", alone), ("everything", both)):
        rows, expected = scored(both, phase), {row.name: row for row in scored(run_end)}
        assert [row.kind for row in rows] == ["soft", "hard"]
        for row in rows:
            end = expected[row.name]
            assert all(vars(row).get(name) == vars(end).get(name) for name in ("nll", "largest_group_fraction"))
            assert row.changes["base"].value == end.changes["base"].value
    assert scored(alone, "router") == []
    probes = [[m for m in measurements if m.metric == "dominance"] for measurements in (alone, both)]
    assert probes[0] == [m for m in probes[1] if m.settings["phase"] == "router"]
    assert [(m.settings["phase"], m.settings["step"]) for m in probes[1]] == [
        *(("router", step) for step in (0, 2, 4)), *(("everything", step) for step in (0, 2, 4, 5)),
    ]  # fmt: skip


def test_comparison_has_rows_for_every_variant_and_phase(tmp_path):
    variants = {name: [f"attention.assignment={name}"] for name in ("softmax", "sinkhorn")}
    result = run(*write_comparison(tmp_path / "conf", [*tiny(tmp_path), *TWO_PHASES], variants), "eval.seq_len=24")
    assert result.code == 0, result.err
    (path,) = (p.parent for p in tmp_path.rglob("record.json") if "-compare" in str(p))
    rows = load_run(path).rows
    probes = to_rows(filter_rows(rows, {"source": "probes", "metric": "dominance"}))
    assert [(row.variant, row.phase, row.trainable) for row in probes] == [
        (variant, phase, "all" if phase == "everything" else "router")
        for variant in variants
        for phase in ("router", "everything")
    ]
    losses = to_rows(filter_rows(rows, {"source": "phases", "metric": "nll", "kind": "hard"}))
    assert [(row.variant, row.phase) for row in losses] == [(row.variant, row.phase) for row in probes]
    assert "## Routing" in (path / "table.md").read_text()
