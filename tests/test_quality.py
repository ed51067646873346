"""The quality table's rows: what each keeps, what it is compared with, and that an interruption loses nothing."""

import io
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
from running import attention_of, fitting, only_run, record_of, router_steps, run, tiny

from focus_exp import config as schema
from focus_exp import set_routing
from focus_exp.attention.selection import Selection, Sequence, count_pairs
from focus_exp.data import Blocks, TokenStream
from focus_exp.evaluation import quality
from focus_exp.evaluation.perplexity import PairShares, Scores, read_scores, write_scores
from focus_exp.evaluation.quality import Quality, equal_density_window
from focus_exp.jobs.fit import attach_method
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.records.answers import keeps_everything
from focus_exp.records.rows import Row
from focus_exp.results.record import Record
from focus_exp.training.precision import choose_precision

FLOAT32 = choose_precision("float32", "cpu", trains_base=False)

T, WINDOW, SINKS, GROUPS = 96, 6, 2, 3
BASE, SOFT, HARD = "base, full attention", "Focus soft", "Focus hard k=1"
WINDOW_ONLY, RANDOM = "window + sinks only", "random groups, same sizes"


def make_config(method: str = "focus", train: str | None = None, **attention) -> schema.Config:
    options = {"groups": GROUPS, "window": WINDOW, "sinks": SINKS} | attention
    phases = {train: schema.PhaseConfig(train=train, steps=1, learning_rate=1e-3)} if train else {}
    return schema.Config(
        model=schema.ModelConfig(name="tiny"),
        attention=attention_of(method, **options),
        recipe=schema.RecipeConfig(name="recipe", phases=phases),
        data=schema.DataConfig(name="random", source="files"),
        eval=schema.EvalConfig(name="eval", seq_len=T, max_sequences=5, batch_size=2, bootstrap_samples=50),
        trainer=schema.TrainerConfig(name="trainer"),
        logger=schema.LoggerConfig(name="logger"),
    )


@pytest.fixture
def measure(tiny_model, tmp_path) -> Callable[..., Quality]:
    """measure(family, config): a tiny model's base and attached rows, scored in `tmp_path`."""

    def run(family: str = "llama", config: schema.Config | None = None, prepare=lambda model: None) -> Quality:
        config = config or make_config()
        tokens = np.random.default_rng(0).integers(0, 256, 10 * T, dtype=np.int32)
        stream = TokenStream("random", tokens, np.array([0, len(tokens)]), ["text"])
        model, precision = tiny_model(family), choose_precision("float32", "cpu", trains_base=False)
        rows = Quality(model, Blocks(stream, T, cross_documents=True), config, precision, tmp_path / "evaluation")
        rows.measure_base()
        attach_method(model, config, precision)
        prepare(model)
        rows.measure_attached()
        return rows

    return run


def by_name(result: Quality) -> dict:
    assert len({row.name for row in result.rows}) == len(result.rows)
    return {row.name: row for row in result.rows}


def test_only_the_k_that_are_asked_for_are_measured_and_the_configured_one(measure):
    config = make_config(top_k=2)
    config.eval.top_k = [3, 7]
    found = [row.top_k for row in measure(config=config).rows if row.kind == "hard"]
    assert found == [2, 3]


def test_the_configured_groups_and_their_controls_are_measured_first_and_stand_in_their_place(measure, capsys):
    config = make_config(top_k=2, pair_rule="share")
    config.eval.pair_rules = ["query_topk"]
    rows = [row.name for row in measure(config=config).rows]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("measured: ")]
    measured = [line.removeprefix("measured: ").split("  ")[0] for line in printed]
    wide = rows[-2]
    assert rows[:-3] == [
        BASE,
        SOFT,
        HARD,
        *(f"Focus hard k={k}{rule}" for rule in (" (share)", " (query_topk)") for k in (2, 3)),
    ]
    assert rows[-3:] == [WINDOW_ONLY, wide, RANDOM]
    assert measured[:5] == [BASE, "Focus hard k=2 (share)", WINDOW_ONLY, wide, RANDOM] and sorted(measured) == sorted(
        rows
    )


def memberships(model, tokens) -> list[tuple[torch.Tensor, Sequence]]:
    """Each layer's group of every token `[B, T]`, and the sequence that the layer saw."""
    seen = []

    def observe(layer, method, selection, sequence):
        seen.append((selection.key_groups.int().argmax(-1), sequence))

    with torch.no_grad(), observe_selections(model, observe):
        model(tokens)
    return seen


def test_the_base_comes_first_and_is_what_the_others_are_compared_with(measure):
    result = measure()
    rows = by_name(result)
    assert result.rows[0].name == BASE and rows[BASE].kind == "base"
    assert (rows[BASE].delta_nll, rows[BASE].delta_low, rows[BASE].delta_high) == (0, 0, 0)
    assert (rows[BASE].distant_pairs_kept, rows[BASE].pairs_removed) == (1, 0)
    assert all(row.error is None and row.tokens == 5 * (T - 1) for row in result.rows)
    for row in result.rows:
        assert row.delta_nll == pytest.approx(row.nll - rows[BASE].nll, abs=1e-5)
        assert row.delta_low <= row.delta_nll <= row.delta_high
        assert row.perplexity == pytest.approx(np.exp(row.nll)) and row.perplexity_low <= row.perplexity_high
        if row.kind == "control":
            assert row.delta_vs_hard == pytest.approx(row.nll - rows[HARD].nll, abs=1e-5)
    inside, beyond = np.log(rows[HARD].perplexity_inside_window), np.log(rows[HARD].perplexity_beyond_window)
    assert rows[HARD].nll * (T - 1) == pytest.approx(inside * (WINDOW - 1) + beyond * (T - WINDOW))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_hard_groups_with_every_group_are_the_base_and_keep_every_pair(measure, family):
    config = make_config()
    config.eval.pair_rules = ["share"]
    rows = by_name(measure(family, config))
    full = [rows[f"Focus hard k={GROUPS} ({rule})"] for rule in ("query_topk", "share")]
    # two sets of 2 of 3 groups always meet
    for row in [*full, rows["Focus hard k=2 (share)"]]:
        assert abs(row.delta_nll) < 1e-4 and row.nll == pytest.approx(rows[BASE].nll, abs=1e-4)
        assert (row.distant_pairs_kept, row.pairs_removed) == (1, 0) and keeps_everything(row)
    for row in (rows[HARD], rows["Focus hard k=2 (query_topk)"]):
        assert 0 < row.distant_pairs_kept < 1 and not keeps_everything(row)
        assert abs(row.delta_nll) > 1e-4


def test_shares_are_those_of_counting_every_pair(measure):
    result = measure("qwen2")  # whose second layer slides over 8 tokens
    tokens = torch.stack([result.blocks[i]["input_ids"] for i in result.indices])
    total = distant = kept = 0
    sizes = []
    for groups, sequence in memberships(set_routing(result.model, hard=True, top_k=1), tokens):
        sizes.append(np.bincount(groups.flatten(), minlength=GROUPS) / groups.numel())
        for group in groups.tolist():
            for i in range(T):
                for j in range(i + 1):
                    if sequence.allowed is not None and not sequence.allowed[0, 0, i, j]:
                        continue
                    total += 1
                    distant += i - j > WINDOW and j >= SINKS
                    kept += i - j > WINDOW and j >= SINKS and group[i] == group[j]
    row = by_name(result)[HARD]
    assert row.distant_pairs_kept == pytest.approx(kept / distant)
    assert row.pairs_removed == pytest.approx((distant - kept) / total)
    np.testing.assert_allclose(result.group_shares, sizes, atol=1e-6)
    assert np.sum(result.group_shares, axis=1) == pytest.approx(1) and len(result.group_shares) == 2
    assert row.largest_group == pytest.approx(np.max(sizes))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_controls_keep_as_many_pairs_as_they_say(measure, family):
    def prefer_a_group(model):
        for method in attached_methods(model).values():
            method.router.potential[1] = 5.0

    result = measure(family, prepare=prefer_a_group)
    rows = by_name(result)
    assert rows[HARD].largest_group > 0.5
    assert rows[WINDOW_ONLY].distant_pairs_kept == 0 and rows[WINDOW_ONLY].pairs_removed > 0.5
    expected = np.mean(np.square(result.group_shares).sum(axis=1))  # of a pair of independent tokens
    assert rows[RANDOM].distant_pairs_kept == pytest.approx(expected, abs=0.08) and expected > 1 / GROUPS + 0.08
    wide = next(row for row in result.rows if row.window is not None)
    assert wide.window > WINDOW and wide.pairs_removed <= rows[HARD].pairs_removed
    assert wide.pairs_removed == pytest.approx(rows[HARD].pairs_removed, abs=0.02)
    # relative to the configured window: the same scale as the hard row's
    assert wide.distant_pairs_kept == pytest.approx(1 - wide.pairs_removed / rows[WINDOW_ONLY].pairs_removed)
    assert wide.distant_pairs_kept >= rows[HARD].distant_pairs_kept


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("sliding", [None, 9])
def test_the_wide_window_is_the_smallest_that_keeps_as_many_pairs(sliding, sinks):
    length, plain = 24, Sequence.plain(1, 24)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    layers = [plain, plain]
    if sliding:
        layers.append(Sequence(plain.start, allowed=((i >= j) & (i - j < sliding))[None, None]))

    def kept(width: int) -> int:
        seen = [(i >= j) if layer.allowed is None else layer.allowed[0, 0] for layer in layers]
        return sum(int((mask & ((i - j <= width) | (j < sinks))).sum()) for mask in seen)

    narrow = [count_pairs(Selection(), layer, 2, sinks) for layer in layers]
    distant = sum(counts.distant for counts in narrow)
    for more in [*range(0, distant, 7), distant]:
        pairs = PairShares(total=kept(length), distant=distant, kept_pairs=more)
        enough = [width for width in range(length) if kept(width) >= kept(2) + more]
        assert equal_density_window(pairs, sinks, layers) == enough[0]


def test_rows_on_disk_are_read_and_damaged_ones_scored_again(measure, monkeypatch, tmp_path):
    first = measure()
    scored = []
    original = quality.score
    monkeypatch.setattr(quality, "score", lambda *args: scored.append(args[-1]) or original(*args))
    assert measure().rows == first.rows and not scored

    path = tmp_path / "evaluation" / "focus_soft.npz"
    whole = path.read_bytes()
    middle = bytearray(whole)
    middle[whole.index(b"nll.npy") + 200] ^= 255
    elsewhere = io.BytesIO()
    with np.load(io.BytesIO(whole)) as arrays:
        np.savez(elsewhere, **{**arrays, "precision": np.array("bf16-mixed")})
    damages = (b"", b"not an archive", whole[: len(whole) // 2], whole[:-1], bytes(middle), elsewhere.getvalue())
    for damaged in damages:
        path.write_bytes(damaged)
        again = measure()
        assert [row.nll for row in again.rows] == [row.nll for row in first.rows]
        assert scored == [SOFT]
        scored.clear()


@pytest.mark.parametrize("reason", ["out of memory\nby 3 GiB", ""])
def test_a_row_that_fails_stays_with_its_reason_and_the_others_go_on(measure, monkeypatch, reason):
    complete = measure()
    monkeypatch.setattr(quality, "read_scores", lambda *_: None)
    original = quality.score

    def failing(model, blocks, indices, batch_size, precision, name):
        if name == SOFT:
            raise RuntimeError(reason)
        return original(model, blocks, indices, batch_size, precision, name)

    monkeypatch.setattr(quality, "score", failing)
    result = measure()
    failed = by_name(result)[SOFT]
    assert failed.error == f"RuntimeError: {reason.splitlines()[0] if reason else 'no reason given'}"
    assert failed.nll is None and not failed.scored and not failed.by_position
    assert [row.name for row in result.rows] == [row.name for row in complete.rows]
    assert all(row.scored for row in result.rows if row is not failed)


def test_a_model_that_gives_nan_has_a_failed_row_and_no_crash(measure):
    def spoil(model):
        with torch.no_grad():
            model.model.layers[1].self_attn.focus.router.projection.fill_(float("nan"))

    rows = by_name(measure(prepare=spoil))
    assert rows[SOFT].error == "RuntimeError: a loss is not finite" and rows[BASE].scored


@pytest.mark.parametrize(
    ("method", "train", "kinds"),
    [
        ("full", None, ["base"]),
        ("full", "all", ["base", "trained"]),
        ("window", None, ["base", "control"]),
        ("random_groups", None, ["base", "control"]),
        ("window", "all", ["base", "trained", "control"]),
        ("focus", "router", ["base", "soft", *["hard"] * GROUPS, *["control"] * 3]),
        ("focus", "all", ["base", "trained", "soft", *["hard"] * GROUPS, *["control"] * 3]),
    ],
)
def test_rows_follow_from_the_method_and_from_what_is_trained(measure, method, train, kinds):
    result = measure(config=make_config(method, train))
    assert [row.kind for row in result.rows] == kinds
    assert all(row.scored for row in result.rows)
    if method == "window":
        assert result.rows[-1].distant_pairs_kept == 0
    for row in result.rows:
        if row.kind == "trained":  # nothing was trained here, and the method is off
            assert row.nll == pytest.approx(result.rows[0].nll, abs=1e-5) and row.pairs_removed == 0


def test_a_method_that_reads_the_future_is_named_so(measure):
    rows = measure(config=make_config(assignment="sinkhorn")).rows
    assert {row.kind: row.causal for row in rows} == {"base": True, "soft": False, "hard": False, "control": True}


def test_windows_are_spread_over_the_split(measure):
    assert measure().indices == [1, 3, 5, 7, 9]


def test_adapters_of_other_runs_are_rows_of_the_same_table(tmp_path):
    fit = [
        "attention.calibration_sequences=2",
        "attention.validation_sequences=1",
        "attention.fit_steps=4",
        "attention.groups=4",
    ]
    dual = fitting(*tiny(tmp_path, "other"), "attention=focus_dual", "recipe=none", *fit)
    assert run(*dual).code == 0
    other = Record.load(next((tmp_path / "other").rglob("record.json")))
    (beside,) = (tmp_path / "other").rglob("adapter")
    retrofit = [*tiny(tmp_path), router_steps(2), "eval.top_k=[1]", f"eval.adapters=['{beside}','{beside}','{beside}']"]
    assert run(*retrofit).code == 0
    rows = {row.name: row for row in record_of(tmp_path / "runs").rows}
    expected = {row.name: row for row in other.rows}
    for name in ("focus_dual", f"focus_dual, {beside.parent.name}", f"focus_dual, {beside.parent.name} (2)"):
        found = rows[name]
        assert (found.kind, found.nll, found.pairs_removed) == ("control", *of(expected["focus_dual"]))
        assert found.delta_vs_hard is not None and found.delta_vs_hard != 0
    assert rows["base, full attention"].nll == expected["base, full attention"].nll
    # what stood there before stands there again
    assert list(rows)[1:3] == ["Focus soft", "Focus hard k=1"]

    # beside any method that is attached
    window = fitting(*tiny(tmp_path, "window"), "attention=window", "recipe=none", f"eval.adapters=['{beside}']")
    assert run(*window).code == 0
    found = {row.name: row for row in record_of(tmp_path / "window").rows}["focus_dual"]
    assert of(found) == of(expected["focus_dual"])
    refused = run(*fitting(*tiny(tmp_path), "attention=full", "recipe=none", f"eval.adapters=['{beside}']"))
    assert refused.code == 2 and "attention=full attaches none" in refused.err

    # the place of an adapter is no part of a run's name, what it holds is
    moved = tmp_path / "moved"
    shutil.copytree(beside, moved)
    assert run(*retrofit[:-1], f"eval.adapters=['{moved}','{moved}','{beside.parent}']").code == 0
    assert only_run(tmp_path / "runs")


def test_scores_of_other_windows_precision_or_weights_are_not_read(tmp_path):
    path, scores = tmp_path / "row.npz", Scores(np.ones((2, 3)), 1.5, None, "math")
    write_scores(path, scores, [0, 4], FLOAT32, "a")
    assert read_scores(path, [0, 4], FLOAT32, "a").seconds == 1.5
    bfloat16 = choose_precision("bf16", "cpu", trains_base=False)
    for other in (([0, 5], FLOAT32, "a"), ([0, 4], bfloat16, "a"), ([0, 4], FLOAT32, "b")):
        assert read_scores(path, *other) is None


def of(row: Row) -> tuple[float | None, float | None]:
    return row.nll, row.pairs_removed


def test_an_adapter_of_another_base_is_refused_before_anything_is_trained(tmp_path):
    assert run(*tiny(tmp_path, "other"), router_steps(1), "seed=1").code == 0
    (beside,) = (tmp_path / "other").rglob("adapter")
    refused = run(*tiny(tmp_path), f"eval.adapters=['{beside}']")
    assert refused.code == 2 and "belongs to" in refused.err and "steps" not in refused.out.split("run folder")[1]
