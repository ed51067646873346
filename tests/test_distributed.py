"""Several processes compute what one does: the same data, losses and adapters, also when they are interrupted."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import scored, stop_training
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Result, fitting, metrics_of, only_run, outcome, record_of, records_of, router_steps, run, tiny
from safetensors.numpy import load_file

from focus_exp.data import make_loader
from focus_exp.models.adapter import SAMPLES
from focus_exp.models.random import byte_tokenizer

QUICK = ("eval.max_sequences=2", "eval.top_k=[1]", "eval.controls=false")
RETROFIT = (router_steps(6), "trainer.checkpoint_every=2", "eval.max_sequences=2")
FINETUNE = (
    *("recipe=finetune", router_steps(3), "recipe.phases.everything.steps=4", "trainer.checkpoint_every=2"),
    *("recipe.phases.everything.learning_rate=1e-3", *QUICK, "model=tiny_gpt2"),  # whose embeddings are tied
    "trainer.gradient_checkpointing=true",
)
LORA = ("recipe=lora", "recipe.phases.lora.steps=3", *QUICK)
SCRATCH = (
    *("+experiment=from_scratch", "variants=[full,focus]", "recipe.steps=3", "recipe.warmup_steps=1", *QUICK),
    "recipe.tune.factors=[0.3,1]",
)
STRATEGIES = {name: ("trainer.devices=2", f"trainer.strategy={name}") for name in ("ddp", "fsdp")}
# one sequence in a batch: two batches of a step at the same time; three steps in an epoch
SMALL_BATCHES = (*RETROFIT, *QUICK, "data.max_train_tokens=400", "trainer.batch_size=1", "trainer.accumulate=4")
# what moves with the tokens of all processes, without any gradient
RECLUSTER = (*RETROFIT, *QUICK, "attention.centroid_update=recluster", "recipe.router.recluster_every=2")
ROUTING = ("recipe=finetune", "attention=routing_transformer", "attention.centroid_decay=0.5", *QUICK)
ROUTING = (*ROUTING, "recipe.phases.everything.steps=4", "recipe.phases.everything.learning_rate=1e-3")
JOBS = {
    "retrofit": RETROFIT, "finetune": FINETUNE, "lora": LORA, "small": SMALL_BATCHES, "recluster": RECLUSTER,
    "routing": ROUTING,
}  # fmt: skip
STOP = {"phase": "everything", "step": 2}
slow = pytest.mark.slow

# runs commands one after the other in a process of torchrun; `stop`: where the one that does not write is stopped
PROGRAM = """
import json, os, sys
from pathlib import Path
import pytest
from builders import stop_training
from running import run
folder, results = Path(sys.argv[1]), []
for command, stop in json.loads((folder / "commands.json").read_text()):
    with pytest.MonkeyPatch.context() as patch:
        if stop and os.environ["RANK"] == "1":
            stop_training(patch, **stop)
        results.append(vars(run(*command)))
(folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))
"""


def launch(folder: Path, commands: list[tuple[list[str], dict[str, Any] | None]]) -> tuple[list[Result], ...]:
    """Return what each of two processes on this machine saw of the commands."""
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "program.py").write_text(PROGRAM)
    (place / "commands.json").write_text(json.dumps(commands))
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = [str(place / "program.py"), str(place)]
    done = subprocess.run([*torchrun, *program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    files = [place / f"results-{rank}.json" for rank in (0, 1)]
    return tuple([Result(**result) for result in json.loads(file.read_text())] for file in files)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def pair(folder):
    """Run name -> what both processes printed; runs named `begun` were started by a single process."""
    return run_pair(folder, [("retrofit", "ddp"), ("finetune", "fsdp")], stopped="fsdp", begun=[("finetune", "ddp")])


@pytest.fixture(scope="module")
def slow_pair(folder):
    """Run the remaining combinations, which take longer."""
    done = [("finetune", "ddp"), ("retrofit", "fsdp"), ("lora", "fsdp")]
    done += [("recluster", "ddp"), ("routing", "ddp"), ("routing", "fsdp")]
    return run_pair(folder, done, stopped="ddp", begun=[("finetune", "fsdp"), ("small", "ddp")])


def run_pair(folder, done, stopped, begun):
    commands = {f"{job}-{strategy}": ([*JOBS[job], *STRATEGIES[strategy]], None) for job, strategy in done}
    commands[f"stopped-{stopped}"] = ([*FINETUNE, *STRATEGIES[stopped]], STOP)
    for job, strategy in begun:
        name = f"begun-{job}-{strategy}"
        commands[name] = ([*JOBS[job], *STRATEGIES[strategy]], None)
        with pytest.MonkeyPatch.context() as patch:
            stop_training(patch, **({"phase": "router", "step": 3} if job == "small" else STOP))
            one_process = ("trainer.devices=1", "trainer.strategy=auto")
            assert run(*fitting(*tiny(folder, name), *JOBS[job]), *one_process).code == 128 + signal.SIGTERM
    both = launch(folder, [(fitting(*tiny(folder, name), *job), stop) for name, (job, stop) in commands.items()])
    return dict(zip(commands, zip(*both, strict=True), strict=True))


@pytest.fixture(scope="module")
def one(folder):
    """one(job): the folder in which a single process has run it."""

    @functools.cache
    def run_one(name):
        assert run(*fitting(*tiny(folder, f"{name}-one"), *JOBS[name])).code == 0
        return folder / f"{name}-one"

    return run_one


def assert_equal(folder, other):
    """Losses and weights of two runs may differ by rounding, all else not at all."""
    actual, expected = outcome(folder), outcome(other)
    assert len(actual["metrics"]) == len(expected["metrics"]) > 0
    for line, expected_line in zip(actual["metrics"], expected["metrics"], strict=True):
        assert (line.pop("phase"), line["step"]) == (expected_line.pop("phase"), expected_line["step"])
        assert line == pytest.approx(expected_line, abs=2e-5, rel=0)
    for row, expected_row in zip(scored(actual["measured"]), scored(expected["measured"]), strict=True):
        assert (row.name, row.error) == (expected_row.name, None)
        assert row.nll == pytest.approx(expected_row.nll, abs=1e-5)
    for key in ("status", "config_hash", "model", "steps", "tokens_seen"):
        assert actual[key] == expected[key]
    assert actual["weights"].keys() == expected["weights"].keys()
    for path in only_run(folder).rglob("*.safetensors"):
        weights, reference = load_file(path), load_file(only_run(other) / path.relative_to(only_run(folder)))
        assert weights.keys() == reference.keys()
        # Adam turns rounding into steps where a gradient is almost nothing
        for name in weights:
            tolerance = 2e-5 if "model" in path.name or name == SAMPLES else 3e-6
            np.testing.assert_allclose(weights[name], reference[name], rtol=0, atol=tolerance)


def in_fixture(*case, fixture):
    """Mark a case as slow if its runs are made by `slow_pair`."""
    return pytest.param(*case, fixture, marks=slow if fixture == "slow_pair" else ())


@pytest.mark.parametrize(
    ("job", "strategy", "fixture"),
    [
        *(in_fixture(*case, fixture="pair") for case in (("retrofit", "ddp"), ("finetune", "fsdp"))),
        *(in_fixture("finetune", "ddp", fixture="slow_pair"), in_fixture("retrofit", "fsdp", fixture="slow_pair")),
        *(in_fixture("lora", "fsdp", fixture="slow_pair"), in_fixture("recluster", "ddp", fixture="slow_pair")),
        *(in_fixture("routing", "ddp", fixture="slow_pair"), in_fixture("routing", "fsdp", fixture="slow_pair")),
    ],
)
def test_two_processes_equal_one(folder, request, one, job, strategy, fixture):
    assert [result.code for result in request.getfixturevalue(fixture)[f"{job}-{strategy}"]] == [0, 0]
    assert_equal(folder / f"{job}-{strategy}", one(job))


@slow
def test_sharded_comparison_from_scratch_equals_that_of_one_process(folder):
    both = launch(folder, [([*tiny(folder, "scratch-two"), *SCRATCH, *STRATEGIES["fsdp"]], None)])
    assert [results[0].code for results in both] == [0, 0]
    assert run(*tiny(folder, "scratch-one"), *SCRATCH).code == 0
    two, one = (losses_of_variants(folder / f"scratch-{name}") for name in ("two", "one"))
    assert two.keys() == one.keys() and len(two) == 7  # two variants, two trials of each, and the comparison
    for variant, losses in two.items():
        assert losses == pytest.approx(one[variant], abs=1e-4)


def losses_of_variants(folder):
    """Return the losses of every run below `folder` by experiment, variant and learning rate."""
    found = {}
    for record in records_of(folder):
        rate = record.config["recipe"]["phases"]["everything"]["learning_rate"]
        rows = {row.name: row.nll for row in scored(record.measurements) if row.nll is not None}
        found[record.experiment, record.config["variant"], rate] = rows
    return found


def test_only_process_zero_writes_and_prints(folder, pair):
    main, other = pair["retrofit-ddp"]
    assert "run folder" in main.out
    assert other.out == ""
    assert "ddp over 2 processes" in record_of(folder / "retrofit-ddp").device
    assert list(folder.rglob("*.aside*")) == []
    assert len(metrics_of(folder / "retrofit-ddp")) == 6


@pytest.mark.parametrize(
    ("strategy", "fixture"), [in_fixture("fsdp", fixture="pair"), in_fixture("ddp", fixture="slow_pair")]
)
def test_one_process_resumes_what_two_began(folder, request, one, strategy, fixture):
    name = f"stopped-{strategy}"
    assert [result.code for result in request.getfixturevalue(fixture)[name]] == [128 + signal.SIGTERM] * 2
    assert record_of(folder / name).status == "interrupted"
    assert run(*tiny(folder, name), *FINETUNE).code == 0
    assert_equal(folder / name, one("finetune"))


@pytest.mark.parametrize(
    ("job", "strategy", "fixture"),
    [
        in_fixture("finetune", "ddp", fixture="pair"),
        in_fixture("finetune", "fsdp", fixture="slow_pair"),
        in_fixture("small", "ddp", fixture="slow_pair"),
    ],
)
def test_two_processes_resume_what_one_began(folder, request, one, job, strategy, fixture):
    name = f"begun-{job}-{strategy}"
    assert [result.code for result in request.getfixturevalue(fixture)[name]] == [0, 0]
    assert_equal(folder / name, one(job))


@slow
def test_killed_process_ends_the_run_which_resumes_to_the_same_numbers(folder, pair):
    command = [*tiny(folder, "killed"), *RETROFIT, *STRATEGIES["ddp"]]
    with pytest.raises(AssertionError, match="SIGKILL"):
        launch(folder, [(command, {"step": 5, "signum": signal.SIGKILL})])
    assert record_of(folder / "killed").status != "finished"
    launch(folder, [(command, None)])
    assert outcome(folder / "killed") == outcome(folder / "retrofit-ddp")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("trainer.num_nodes=2", "torchrun --nnodes=2"),
        ("trainer.devices=2", "torchrun --standalone --nproc-per-node=2"),
    ],
)
def test_another_number_of_processes_is_refused(tmp_path, setting, key):
    result = run(*tiny(tmp_path), setting)
    assert result.code == 2
    assert key in result.err


def test_process_group_that_was_not_configured_is_refused(tmp_path, monkeypatch):
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    result = run(*tiny(tmp_path), *RETROFIT)
    assert result.code == 2
    assert "trainer.devices=1" in result.err


# on a GPU

GPU = ("trainer.accelerator=gpu", "trainer.devices=1")


@pytest.mark.gpu
@pytest.mark.parametrize("job", ["retrofit", "finetune"])
def test_sharded_model_on_one_gpu_equals_a_whole_one(tmp_path, job):
    assert run(*fitting(*tiny(tmp_path, "whole"), *JOBS[job]), *GPU).code == 0
    assert run(*fitting(*tiny(tmp_path, "sharded"), *JOBS[job]), *GPU, "trainer.strategy=fsdp").code == 0
    losses, expected = ([line["loss"] for line in metrics_of(tmp_path / name)] for name in ("sharded", "whole"))
    assert losses == pytest.approx(expected, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_routers_train_on_a_quantized_base(tmp_path, tiny_model, quantization):
    pytest.importorskip("bitsandbytes")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    command = [*tiny(tmp_path), *RETROFIT, *GPU, "trainer.precision=bf16", f"model.path={tmp_path / 'model'}"]
    assert run(*command, f"model.quantization={quantization}").code == 0
    record = record_of(tmp_path)
    assert all(row.error is None and np.isfinite(row.nll) for row in scored(record.measurements))
    assert all(np.isfinite(line["loss"]) for line in metrics_of(tmp_path))
    weights = load_file(only_run(tmp_path) / "adapter" / "focus_adapter.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


@given(
    batch_size=st.integers(1, 4),
    batches=st.integers(1, 3),
    world_size=st.integers(1, 6),
    blocks=st.integers(1, 80),
    seed=st.integers(0, 9),
    first=st.integers(0, 4),
)
@settings(max_examples=60)
def test_loader_step_has_the_same_blocks_for_any_world_size(batch_size, batches, world_size, blocks, seed, first):
    accumulate = batches * world_size
    if blocks < batch_size * accumulate:
        return
    dataset, steps = torch.arange(blocks), range(first, 5)
    whole = [step.tolist() for step in make_loader(dataset, batch_size, seed, range(5), accumulate=accumulate)]
    options = {"accumulate": accumulate, "world_size": world_size}
    parts = [make_loader(dataset, batch_size, seed, steps, rank=rank, **options) for rank in range(world_size)]
    assert [len(part) for part in parts] == [5] * world_size
    # (steps, batches in turn, processes, items of a batch)
    seen = torch.stack([torch.stack([*part]).unflatten(1, (batches, batch_size)) for part in parts], 2)
    assert seen.flatten(1).tolist() == whole[first:]
