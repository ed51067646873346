"""Speed benchmark: alternating clocks, peak memory, counted pairs, resume and refusals."""

import mmap
import signal
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from builders import timings
from hypothesis import given, settings
from hypothesis import strategies as st
from running import fitting, only_run, record_of, router_steps, run, succeed, tiny
from transformers import DynamicCache, StaticCache

from focus_exp import attach, set_routing
from focus_exp.attention.baselines.performer import Performer
from focus_exp.attention.selection import Sequence, count_pairs
from focus_exp.models.methods import disable_method, observe_selections
from focus_exp.speed import bench
from focus_exp.speed.layer import Case, Layer, time_cases
from focus_exp.speed.model import full_attention_works, time_decode_model, time_prefill
from focus_exp.speed.timing import begin_peak_memory, peak_memory, time_in_turns
from focus_exp.speed.workload import Shape, Tensors, balanced, full_attention_kernels
from focus_exp.training.precision import Precision

CPU = torch.device("cpu")
SHAPE = Shape(width=32, heads=4, kv_heads=2, head_dim=16)
LAYER = Layer(SHAPE, window=8, sinks=2, dtype=torch.float32, device=CPU, repeats=1)
FLOAT32 = Precision(CPU, torch.float32, False, "test")
BENCH = ["+experiment=speed", "bench.lengths=[48,80]", "bench.groups=[2,4]", "bench.top_k=[1]", router_steps(1)]
FIT = ["recipe.fit.sequences=2", "recipe.fit.validation_sequences=1", "recipe.fit.steps=4"]
LAYER_ONLY = ["bench.prefill_lengths=[]", "bench.step_lengths=[]", "bench.decode_lengths=[]"]


def test_time_in_turns_alternates_and_warms_up():
    calls = []
    seconds = time_in_turns({name: (lambda name=name: calls.append(name)) for name in "abc"}, 2, CPU)
    assert calls == list("abc") * 3 and [*seconds] == list("abc")


def occupy(size: int) -> None:
    """Touch `size` bytes of new pages, which malloc could take from those that earlier tests left free."""
    with mmap.mmap(-1, size) as pages:
        for place in range(0, size, mmap.PAGESIZE):
            pages[place] = 1


def test_peak_memory_of_a_run_is_its_own():
    occupy(256 << 20)  # of another run
    begin_peak_memory()
    start = peak_memory()
    occupy(64 << 20)
    assert start + 50 * 2**20 < peak_memory() < start + 100 * 2**20
    begin_peak_memory()
    assert peak_memory() < start + 20 * 2**20


@given(st.integers(1, 200), st.sampled_from([1, 2, 5]), st.integers(1, 2), st.sampled_from(["query_topk", "share"]))
@settings(max_examples=25)
def test_balanced_groups_are_even_and_their_pairs_counted(length, groups, top_k, rule):
    top_k = min(top_k, groups)
    selection = balanced(groups, length, top_k, rule).select(length, CPU)
    sizes = balanced(groups, length).select(length, CPU).key_groups[0].sum(0)
    assert sizes.max() - sizes.min() <= 1
    plain = Sequence.plain(1, length)
    by_pair = count_pairs(selection, replace(plain, valid=torch.ones(1, length, dtype=torch.bool)), 8, 2)
    assert count_pairs(selection, plain, 8, 2) == by_pair


def test_groups_repeat_beyond_their_scores():
    groups = balanced(3, 10)
    long = groups.select(25, CPU).key_groups[0]
    assert torch.equal(long[:10], long[10:20]) and torch.equal(long[20:], long[:5])


@torch.no_grad()
def test_benchmark_case_equals_masked_and_full_attention():
    tensors = Tensors.random(SHAPE, 100, torch.float32, CPU)
    case = Case.from_groups(LAYER, "focus", balanced(3, 100))
    out = case.work("attention", tensors)()
    torch.testing.assert_close(out, case.work("kernels", tensors)(), atol=0, rtol=0)
    run = case.work("attention", tensors)
    case.method.backend = "masked"
    torch.testing.assert_close(out, run(), atol=1e-5, rtol=1e-5)
    everything = Case.from_groups(LAYER, "focus", balanced(1, 100)).work("attention", tensors)()
    for full in full_attention_kernels(tensors).values():
        torch.testing.assert_close(everything, full(), atol=1e-5, rtol=1e-5)


def test_layer_timings_describe_what_ran():
    cases = [Case.from_groups(LAYER, "focus", groups) for groups in (balanced(2, 100), balanced(4, 100, top_k=2))]
    rows = timings(time_cases(LAYER, 100, cases, ("attention", "kernels")))
    assert [(r.clock, r.groups, r.top_k) for r in rows] == [
        ("attention", 2, 1), ("kernels", 2, 1), ("attention", 4, 2), ("kernels", 4, 2),
    ]  # fmt: skip
    assert all(r.path == "cpu" and r.speedup > 0 and r.density < 1 and r.full_kernel in ("sdpa", "cpu") for r in rows)
    assert rows[0].full_latency_ms == rows[3].full_latency_ms  # one full attention for all, in the same rounds
    (captured,) = timings(time_cases(replace(LAYER, graphs=True), 100, cases[:1]))  # no graphs on a CPU
    assert captured.path == "cpu" and captured.full_kernel in ("sdpa", "cpu")
    (step,) = timings(time_cases(LAYER, 100, cases[:1], ("attention step",)))
    assert step.clock == "attention step" and step.latency_ms > 0


def attach_hard(tiny_model, **options):
    torch.manual_seed(0)
    return set_routing(attach(tiny_model("llama"), "focus", window=8, sinks=2, **options), hard=True)


def test_model_timings_leave_the_model_unchanged(tiny_model):
    model = attach_hard(tiny_model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens, counts = torch.randint(256, (1, 64)), []
    (prefill,) = timings(time_prefill(model, tokens, FLOAT32, 1, "focus"))
    assert prefill.latency_ms > 0 and prefill.path == "masked"
    with observe_selections(model, lambda _, method, *rest: counts.append(method.count_pairs(*rest))):
        model(tokens)
    assert prefill.density == pytest.approx(sum(count.density for count in counts) / len(counts))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_time_prefill_full_kernels_give_the_base_logits(tiny_model):
    model, tokens, found = attach_hard(tiny_model), torch.randint(256, (1, 256)), []
    with torch.no_grad():
        works = full_attention_works(model, lambda: found.append(model(tokens).logits), 256)
        for work in works.values():
            work()
    torch.testing.assert_close(found[-1], found[0], atol=1e-5, rtol=1e-5)
    (row,) = timings(time_prefill(model, tokens, FLOAT32, 1, "focus"))
    assert row.full_kernel in works


@pytest.mark.parametrize("groups", [1, 4])
def test_time_decode_model_counts_what_a_sliding_layer_keeps_and_reads(groups, tiny_model):
    model = set_routing(attach(tiny_model("gemma3"), "focus", groups=groups, window=4, sinks=1), hard=True)
    rows = timings(time_decode_model(model, torch.randint(256, (1, 24)), FLOAT32, 1, "focus"))
    assert [row.path for row in rows] == ["cached, dynamic", "cached, static"]
    caches = {"cached, dynamic": DynamicCache(config=model.config), "cached, static": StaticCache(model.config, 24)}
    sizes = {}
    for name, cache in caches.items():
        with torch.no_grad(), disable_method(model):
            model(torch.randint(256, (1, 24)), past_key_values=cache)
        sizes[name] = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    for row in rows:
        assert row.full_peak_memory_bytes == sizes[row.full_kernel]
        assert (row.density == 1) == (groups == 1)


@torch.no_grad()
def test_time_decode_model_stays_within_the_positions(tiny_model):
    model = set_routing(attach(tiny_model("gpt2", n_positions=48), "focus", groups=2, window=4, sinks=1), hard=True)
    ids: list[int] = []
    model.transformer.wpe.register_forward_pre_hook(lambda _, args: ids.append(int(args[0].max())))
    rows = timings(time_decode_model(model, torch.randint(256, (1, 48)), FLOAT32, 2, "focus"))
    assert all(row.latency_ms > 0 and row.seq_len == 48 for row in rows) and max(ids) == 47
    with pytest.raises(RuntimeError, match="bench.decode_lengths"):
        list(time_decode_model(model, torch.randint(256, (1, 24)), FLOAT32, 2, "focus"))


@torch.no_grad()
def test_compiled_models_are_timed_next_to_the_fastest_full_attention(tiny_model):
    model, tokens = attach_hard(tiny_model), torch.randint(256, (1, 64))
    for measure, path in ((time_prefill, "masked"), (time_decode_model, "cached, static")):
        rows = timings(measure(model, tokens, FLOAT32, 1, "focus", ["default"]))
        assert {path, f"{path}, compiled"} <= {row.path for row in rows}
        (full,) = {(row.full_kernel, row.full_latency_ms) for row in rows}
        assert full[0] in {row.path for row in rows} | {"sdpa", "sdpa, compiled"}
        assert all(row.speedup == pytest.approx(full[1] / row.latency_ms) for row in rows)


def test_bench_job_leaves_out_whole_models_beyond_the_positions(tmp_path):
    lengths = ["bench.prefill_lengths=[64,4096]", "bench.decode_lengths=[40,8192]", "bench.lengths=[600]"]
    result = succeed(*tiny(tmp_path), *BENCH, "model=tiny_gpt2", *lengths, "bench.step_lengths=[]")
    rows = timings(record_of(tmp_path).measurements)
    assert {(row.clock, row.seq_len) for row in rows} == {
        *((clock, 600) for clock in ("attention", "kernels")), ("prefill", 64), ("decode model", 40),
    }  # fmt: skip
    assert all(row.error is None for row in rows)
    (warning,) = record_of(tmp_path).warnings
    assert warning in result.err and all(part in warning for part in ("4096", "8192", "512 positions"))


def test_bench_job_measures_every_clock_with_balanced_and_trained_groups(tmp_path):
    succeed(*tiny(tmp_path), *BENCH)
    record = record_of(tmp_path)
    rows = timings(record.measurements)
    layers = [("balanced", 2), ("balanced", 4), ("trained", 2)]
    assert {(row.clock, row.seq_len, row.groups, row.assignment) for row in rows} == {
        *((clock, n, k, a) for clock in ("attention", "kernels") for n in (48, 80) for a, k in layers),
        *(("attention step", 64, k, a) for a, k in layers),
        ("decode model", 40, 2, "trained"),
        ("prefill", 64, 2, "trained"),
    }
    assert all(row.error is None and row.latency_ms for row in rows)
    for row in (row for row in rows if row.clock.startswith("decode")):
        assert 0 < row.density < 1 and row.peak_memory_bytes >= row.full_peak_memory_bytes
        assert row.path in ("cached, dynamic", "cached, static") and row.full_kernel.startswith("cached")
    assert record.steps == 1 and (only_run(tmp_path) / "adapter").is_dir()
    assert "decode" in (only_run(tmp_path) / "table.md").read_text()
    again = run(*tiny(tmp_path), *BENCH)
    assert again.code == 0 and "already finished" in again.out


def test_interrupted_bench_job_starts_again_and_a_failure_keeps_its_error(tmp_path, monkeypatch):
    real, calls = bench.time_cases, []

    def stopping(layer, length, *rest):
        calls.append(length)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        if length == 64:
            raise RuntimeError("out of everything")
        return real(layer, length, *rest)

    monkeypatch.setattr(bench, "time_cases", stopping)
    command = [*tiny(tmp_path), "job=bench", "recipe=none", "bench.lengths=[32,48,64]", *LAYER_ONLY]
    assert run(*command).code == 128 + signal.SIGTERM
    assert record_of(tmp_path).status == "interrupted" and timings(record_of(tmp_path).measurements)
    succeed(*command)
    assert calls == [32, 48, 32, 48, 64]
    rows = timings(record_of(tmp_path).measurements)
    assert {row.assignment for row in rows} == {"balanced"}
    assert {row.seq_len for row in rows if row.speedup} == {32, 48}
    (failed,) = (row for row in rows if row.seq_len == 64)
    assert "out of everything" in failed.error and failed.speedup is None


@pytest.mark.slow
def test_bench_job_times_layers_of_other_methods_and_keeps_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Performer, "route", Mock(side_effect=RuntimeError("no features")))
    methods = ["window", "longformer", "performer", "routing_transformer", "sparq", "magicpig", "random_groups"]
    options = ["job=bench", "recipe=none", "bench.lengths=[48]", f"bench.methods=[{','.join(methods)}]"]
    succeed(*tiny(tmp_path), *options, *LAYER_ONLY)
    rows = {row.method: row for row in timings(record_of(tmp_path).measurements) if getattr(row, "method", None)}
    assert list(rows) == methods and "no features" in rows.pop("performer").error
    assert all(row.speedup and row.seq_len == 48 for row in rows.values())
    masked = {name for name, row in rows.items() if row.path == "masked"}
    assert masked == {"routing_transformer", "sparq", "magicpig"}


@pytest.mark.parametrize(("method", "fails"), [("focus_dual", False), ("focus_dual", True), ("key_gate", False)])
def test_bench_job_times_a_fitted_router(tmp_path, monkeypatch, method, fails):
    if fails:
        monkeypatch.setattr(bench, "time_prefill", Mock(side_effect=RuntimeError("out of everything")))
    lengths = ["bench.lengths=[300]", "bench.prefill_lengths=[32,48]", "bench.decode_lengths=[40]"]
    more = ["bench.step_lengths=[40]", "bench.methods=[window]", "attention.density=0.3"]
    options = [f"attention={method}", "recipe=none", "attention.groups=4", "attention.top_k=1"]
    succeed(*fitting(*tiny(tmp_path), "job=bench", *options, *FIT, *lengths, *more))
    rows = timings(record_of(tmp_path).measurements)
    cases = [(row.clock, row.method, row.seq_len) for row in rows]
    timed = [("attention", 300), ("attention step", 40), ("prefill", 32), ("prefill", 48), *[("decode model", 40)] * 2]
    assert cases == [*((clock, method, length) for clock, length in timed), ("attention", "window", 300)]
    for row in rows:
        if fails and row.clock == "prefill":
            assert "out of everything" in row.error
            continue
        assert row.speedup and (row.density is None) == (row.method == "window")
        assert row.latency_ms > 0 and row.full_latency_ms > 0
    assert rows[0].path == "cpu"
    table = (only_run(tmp_path) / "table.md").read_text()
    assert ("failed" if fails else "prefill") in table
