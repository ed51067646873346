"""Several processes compute what one does: the same data, losses and adapters, whoever is stopped or killed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import write_variants
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Result, fitting, metrics_of, only_run, outcome, record_of, router_steps, run, tiny
from safetensors.numpy import load_file

from focus_exp.config import LoraConfig, PhaseConfig
from focus_exp.data import ResumableLoader
from focus_exp.data.loader import share_of
from focus_exp.errors import UserError
from focus_exp.models.attach import attach
from focus_exp.models.lora import add_lora
from focus_exp.models.random import byte_tokenizer
from focus_exp.results.record import Record
from focus_exp.training.callbacks import Checkpoint
from focus_exp.training.module import LanguageModelTask
from focus_exp.training.strategies import ShardedStrategy

QUICK = ("eval.max_sequences=2", "eval.top_k=[1]", "eval.controls=false")
RETROFIT = (router_steps(6), "trainer.checkpoint_every=2", "eval.max_sequences=2")
FINETUNE = (
    *("recipe=finetune", router_steps(3), "recipe.phases.everything.steps=4", "trainer.checkpoint_every=2"),
    *("recipe.phases.everything.learning_rate=1e-3", *QUICK, "model=tiny_gpt2"),  # whose embeddings are tied
    "trainer.gradient_checkpointing=true",
)
LORA = ("recipe=lora", "recipe.phases.lora.steps=3", *QUICK)
STRATEGIES = {name: ("trainer.devices=2", f"trainer.strategy={name}") for name in ("ddp", "fsdp")}
# one sequence in a batch: two batches of a step at the same time; three steps in an epoch
SMALL_BATCHES = (*RETROFIT, *QUICK, "data.max_train_tokens=400", "trainer.batch_size=1", "trainer.accumulate=4")
# what moves with the tokens of all processes, without any gradient
RECLUSTER = (*RETROFIT, *QUICK, "attention.centroid_update=recluster", "attention.recluster_every=2")
ROUTING = ("recipe=finetune", "attention=routing_transformer", "attention.centroid_decay=0.5", *QUICK)
ROUTING = (*ROUTING, "recipe.phases.everything.steps=4", "recipe.phases.everything.learning_rate=1e-3")
JOBS = {
    "retrofit": RETROFIT, "finetune": FINETUNE, "lora": LORA, "small": SMALL_BATCHES, "recluster": RECLUSTER,
    "routing": ROUTING,
}  # fmt: skip
QUICK_DONE, SLOW_DONE = (
    [("retrofit", "ddp"), ("finetune", "fsdp")],
    [
        *(("finetune", "ddp"), ("retrofit", "fsdp"), ("lora", "fsdp")),
        *(("recluster", "ddp"), ("routing", "ddp"), ("routing", "fsdp")),
    ],
)
STOP = ("everything", 2)
slow = pytest.mark.slow

# runs commands one after the other in a process of torchrun; `stop`: where one process is stopped politely
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from running import run
from focus_exp.training.callbacks import Checkpoint
original, stop = Checkpoint.on_train_batch_end, None
def on_train_batch_end(self, trainer, module, *rest):
    # asked of one process, and not of the one that writes
    if [module.name, trainer.global_step] == stop and os.environ["RANK"] == "1" and self.received is None:
        signal.raise_signal(signal.SIGTERM)
    original(self, trainer, module, *rest)
Checkpoint.on_train_batch_end = on_train_batch_end
folder, results = Path(sys.argv[1]), []
for command, stop in json.loads((folder / "commands.json").read_text()):
    results.append(vars(run(*command)))
(folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    """Run two processes on this machine."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def launch(folder: Path, commands: list[tuple[list[str], tuple[str, int] | None]]) -> tuple[list[Result], ...]:
    """Return what each of two processes saw of the commands."""
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "program.py").write_text(PROGRAM)
    (place / "commands.json").write_text(json.dumps(commands))
    done = torchrun(str(place / "program.py"), str(place))
    assert done.returncode == 0, done.stderr
    files = [place / f"results-{rank}.json" for rank in (0, 1)]
    return tuple([Result(**result) for result in json.loads(file.read_text())] for file in files)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


def stopped(strategy):
    return {f"stopped-{strategy}": ([*FINETUNE, *STRATEGIES[strategy]], STOP)}


def begun(strategy):
    return {f"begun-{strategy}": ([*FINETUNE, *STRATEGIES[strategy]], None)}


@pytest.fixture(scope="module")
def pair(folder):
    """name -> what both processes saw of a run in `folder / name`; single processes have begun some of them."""
    uneven = ([*RETROFIT, *STRATEGIES["ddp"], "trainer.batch_size=3", "trainer.accumulate=1"], None)
    return seen_by_both(folder, QUICK_DONE, stopped("fsdp") | begun("ddp") | {"uneven": uneven})


@pytest.fixture(scope="module")
def more(folder):
    """The same of what takes longer."""
    small = ([*SMALL_BATCHES, *STRATEGIES["ddp"]], None)
    return seen_by_both(folder, SLOW_DONE, stopped("ddp") | begun("fsdp") | {"begun-small": small})


def seen_by_both(folder, done, others):
    commands = {f"{job}-{strategy}": ([*JOBS[job], *STRATEGIES[strategy]], None) for job, strategy in done} | others
    for name in (name for name in commands if name.startswith("begun")):
        phase, step = ("router", 3) if name == "begun-small" else STOP
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, phase, step)
            assert (
                run(
                    *fitting(*tiny(folder, name), *commands[name][0]), "trainer.devices=1", "trainer.strategy=auto"
                ).code
                == 143
            )
    both = launch(folder, [(fitting(*tiny(folder, name), *job), stop) for name, (job, stop) in commands.items()])
    return dict(zip(commands, zip(*both, strict=True), strict=True))


@pytest.fixture(scope="module")
def one(folder):
    """one(job): the folder in which a single process has done it."""
    done = {}

    def runs(name):
        if name not in done:
            assert run(*fitting(*tiny(folder, f"{name}-one"), *JOBS[name])).code == 0
            done[name] = folder / f"{name}-one"
        return done[name]

    return runs


def stop_at(monkeypatch, phase, step, act=lambda: signal.raise_signal(signal.SIGTERM)):
    """`act` after optimiser step `step` of `phase`, before its checkpoint."""
    whole = Checkpoint.on_train_batch_end

    def batch_end(self, trainer, module, *rest):
        if (module.name, trainer.global_step) == (phase, step) and self.received is None:
            act()
        whole(self, trainer, module, *rest)

    monkeypatch.setattr(Checkpoint, "on_train_batch_end", batch_end)


def assert_equal(folder, other):
    """Losses, scores and weights of two runs differ by rounding alone; all else does not."""
    mine, theirs = outcome(folder), outcome(other)
    assert len(mine["metrics"]) == len(theirs["metrics"]) > 0
    for ours, expected in zip(mine["metrics"], theirs["metrics"], strict=True):
        assert (ours.pop("phase"), ours["step"]) == (expected.pop("phase"), expected["step"])
        assert ours == pytest.approx(expected, abs=2e-5, rel=0)
    for row, expected in zip(mine["rows"], theirs["rows"], strict=True):
        assert (row["name"], row["error"]) == (expected["name"], None)
        assert row["nll"] == pytest.approx(expected["nll"], abs=1e-5)
    for key in ("status", "config_hash", "model", "steps", "tokens_seen"):
        assert mine[key] == theirs[key]
    assert mine["weights"].keys() == theirs["weights"].keys()
    for path in only_run(folder).rglob("*.safetensors"):
        weights, whole = load_file(path), load_file(only_run(other) / path.relative_to(only_run(folder)))
        assert weights.keys() == whole.keys()
        for name in weights:
            # Adam turns rounding into steps where a gradient is almost nothing
            np.testing.assert_allclose(weights[name], whole[name], rtol=0, atol=2e-5 if "model" in path.name else 3e-6)


# what is computed


def on_two(name, fixture):
    """The runs of this name, which this fixture has made."""
    return pytest.param(*name, fixture, marks=slow if fixture == "more" else ())


@pytest.mark.parametrize(
    ("job", "strategy", "made"),
    [*(on_two(name, "pair") for name in QUICK_DONE), *(on_two(name, "more") for name in SLOW_DONE)],
)
def test_two_processes_compute_what_one_does(folder, request, one, job, strategy, made):
    assert [result.code for result in request.getfixturevalue(made)[f"{job}-{strategy}"]] == [0, 0]
    assert_equal(folder / f"{job}-{strategy}", one(job))


@pytest.mark.parametrize(("strategy", "made"), [on_two(["ddp"], "pair"), on_two(["fsdp"], "more")])
def test_one_process_writes_and_prints(folder, request, strategy, made):
    main, other = request.getfixturevalue(made)[f"retrofit-{strategy}"]
    assert "measured: base" in main.out and "run folder" in main.out
    assert other.out == ""
    record = record_of(folder / f"retrofit-{strategy}")
    assert f"{strategy} over 2 processes" in record.device
    files = [path.relative_to(only_run(folder / f"retrofit-{strategy}")) for path in folder.rglob("*.aside*")]
    assert files == [] and len(metrics_of(folder / f"retrofit-{strategy}")) == 6


@slow
def test_the_adapter_of_a_sharded_base_fits_the_base(folder, more):
    adapter = only_run(folder / "retrofit-fsdp") / "adapter"
    assert run(*tiny(folder, "evaluated"), "eval.max_sequences=2", "job=evaluate", f"adapter={adapter}").code == 0
    trained, evaluated = (
        {row.name: row.nll for row in record_of(folder / name).rows} for name in ("retrofit-fsdp", "evaluated")
    )
    assert evaluated == pytest.approx(trained, abs=1e-6)


# what is interrupted


@pytest.mark.parametrize(("strategy", "made"), [on_two(["fsdp"], "pair"), on_two(["ddp"], "more")])
def test_one_process_goes_on_where_two_were_stopped(folder, request, one, strategy, made):
    assert [result.code for result in request.getfixturevalue(made)[f"stopped-{strategy}"]] == [143, 143]
    name = f"stopped-{strategy}"
    assert record_of(folder / name).status == "interrupted"
    assert run(*tiny(folder, name), *FINETUNE).code == 0
    assert_equal(folder / name, one("finetune"))


@pytest.mark.parametrize(
    ("name", "job", "made"),
    [
        on_two(["begun-ddp", "finetune"], "pair"),
        on_two(["begun-fsdp", "finetune"], "more"),
        on_two(["begun-small", "small"], "more"),
    ],
)
def test_two_processes_go_on_where_one_was_stopped(folder, request, one, name, job, made):
    assert [result.code for result in request.getfixturevalue(made)[name]] == [0, 0]
    assert_equal(folder / name, one(job))


def test_a_checkpoint_of_a_sharded_phase_holds_what_a_method_moves_by_itself(tiny_model):
    model = add_lora(attach(tiny_model("llama"), "routing_transformer", groups=2), LoraConfig(), budget=0)
    task = LanguageModelTask(model, PhaseConfig(train="lora", steps=1, learning_rate=1.0), "phase")
    strategy = ShardedStrategy()
    strategy.connect(task)
    kept = {name.removeprefix("model.") for name in strategy.lightning_module_state_dict()}
    assert kept == {name for name in model.state_dict() if task.changes(name)} > set(task.trainable_names)


@slow
def test_killed_process_ends_the_run_which_resumes_to_the_same_numbers(folder, pair):
    program = folder / "killed.py"
    program.write_text(
        "import os, signal, sys\n"
        "from focus_exp import __main__\n"
        "from focus_exp.training.callbacks import Checkpoint\n"
        "original = Checkpoint.on_train_batch_end\n"
        "def on_train_batch_end(self, trainer, *rest):\n"
        "    if trainer.global_step == 5 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    original(self, trainer, *rest)\n"
        "Checkpoint.on_train_batch_end = on_train_batch_end\n"
        "sys.exit(__main__.main())\n"
    )
    command = [*tiny(folder, "killed"), *RETROFIT, *STRATEGIES["ddp"]]
    assert torchrun(str(program), *command).returncode != 0
    assert record_of(folder / "killed").status in ("failed", "interrupted")
    resumed = torchrun("-m", "focus_exp", *command)
    assert resumed.returncode == 0, resumed.stderr
    assert outcome(folder / "killed") == outcome(folder / "retrofit-ddp")


@slow
def test_comparison_of_two_processes_equals_one(folder):
    variants = write_variants(
        folder / "conf", {"focus": ["recipe.steps=2"], "window": ["attention=window", "recipe=none"]}
    )
    command = ["job=compare", *variants, *QUICK]
    assert run(*tiny(folder, "compared-one"), *command).code == 0
    done = torchrun("-m", "focus_exp", *tiny(folder, "compared"), *command, *STRATEGIES["ddp"])
    assert done.returncode == 0, done.stderr
    losses = [
        sorted((record.config["variant"] or "", row.nll) for record in records(folder / name) for row in record.rows)
        for name in ("compared", "compared-one")
    ]
    assert len(losses[0]) == len(losses[1]) > 0
    for (variant, loss), (expected_variant, expected) in zip(*losses, strict=True):
        assert variant == expected_variant
        assert loss == pytest.approx(expected, abs=1e-5)


def records(folder):
    return [Record.load(path) for path in sorted(folder.rglob("record.json"))]


# what is refused


def test_a_step_that_cannot_be_split_is_refused(pair):
    assert [result.code for result in pair["uneven"]] == [2, 2]
    assert "trainer.batch_size=3 x trainer.accumulate=1" in pair["uneven"][0].err
    assert "make their product a multiple of 2" in pair["uneven"][0].err


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("trainer.devices=2", "trainer.strategy=single"), "trainer.strategy=single is one process, not 2"),
        (("trainer.num_nodes=2",), "torchrun --nnodes=2"),
        (("trainer.devices=2",), "torchrun --standalone --nproc-per-node=2"),
        (("trainer.cpu_offload=true",), "trainer.cpu_offload=true goes with trainer.strategy=fsdp, not single"),
        (("trainer.cpu_offload=true", "trainer.strategy=fsdp"), "relieves a GPU, and there is none"),
        (("recipe=dora", "trainer.strategy=fsdp"), "use trainer.strategy=ddp, or recipe=lora"),
        (
            ("attention=focus_dual", "attention.top_k=1", "trainer.strategy=fsdp"),
            "attention=focus_dual is fitted by a whole model",
        ),
        (("attention=token_indexer", "recipe=none", "trainer.strategy=fsdp"), "token_indexer is fitted by a whole"),
        (("model.quantization=nf4",), "model.quantization=nf4 needs a CUDA GPU; use model.quantization=none"),
        (("model.quantization=int8", "job=bench"), "model.quantization=int8 is for pretrained weights"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(tmp_path, asked, message):
    refused = run(*fitting(*tiny(tmp_path), *asked))
    assert refused.code == 2 and message in refused.err


def test_processes_that_nobody_asked_for_are_refused(tmp_path, monkeypatch):
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    refused = run(*tiny(tmp_path), *RETROFIT)
    assert refused.code == 2 and "trainer.devices=1" in refused.err


# on a GPU

GPU = ("trainer.accelerator=gpu", "trainer.devices=1")


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("trainer.cpu_offload=true",)], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize("job", ["retrofit", "finetune"])
def test_a_sharded_model_on_one_gpu_computes_what_a_whole_one_does(tmp_path, job, more):
    assert run(*fitting(*tiny(tmp_path, "whole"), *JOBS[job]), *GPU).code == 0
    assert run(*fitting(*tiny(tmp_path, "sharded"), *JOBS[job]), *GPU, "trainer.strategy=fsdp", *more).code == 0
    losses, expected = ([line["loss"] for line in metrics_of(tmp_path / name)] for name in ("sharded", "whole"))
    assert losses == pytest.approx(expected, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_routers_are_trained_on_a_quantised_base(tmp_path, tiny_model, quantization):
    pytest.importorskip("bitsandbytes")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    command = [*tiny(tmp_path), *RETROFIT, *GPU, "trainer.precision=bf16", f"model.path={tmp_path / 'model'}"]
    assert run(*command, f"model.quantization={quantization}").code == 0
    record = record_of(tmp_path)
    assert all(row.error is None and np.isfinite(row.nll) for row in record.rows)
    assert all(np.isfinite(line["loss"]) for line in metrics_of(tmp_path))
    weights = load_file(only_run(tmp_path) / "adapter" / "focus_adapter.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


# which data


@given(
    batch_size=st.integers(1, 6),
    accumulate=st.integers(1, 6),
    world_size=st.integers(1, 12),
    blocks=st.integers(1, 80),
    seed=st.integers(0, 9),
)
@settings(max_examples=200)
def test_every_step_has_the_same_blocks_over_any_number_of_processes(batch_size, accumulate, world_size, blocks, seed):
    step = batch_size * accumulate
    if blocks < step:
        return
    if step % world_size:
        with pytest.raises(UserError, match=f"a multiple of {world_size}"):
            share_of(batch_size, accumulate, world_size)
        return
    dataset = torch.arange(blocks)
    share = share_of(batch_size, accumulate, world_size)
    assert share.batch_size * share.accumulate * world_size == step
    whole = ResumableLoader(dataset, batch_size, seed, accumulate=accumulate)
    parts = [
        ResumableLoader(dataset, batch_size, seed, accumulate=accumulate, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    batches = [batch.tolist() for batch in whole]
    seen = [[batch.tolist() for batch in part] for part in parts]
    split = world_size // share.parallel
    for turn in range(len(parts[0])):
        # the processes that split a batch hold it together, in its order
        for number in range(share.parallel):
            held = [item for part in seen[number * split : (number + 1) * split] for item in part[turn]]
            assert held == batches[turn * share.parallel + number]
    assert (
        [len(part) for part in parts] == [len(part) for part in seen] == [len(batches) // share.parallel] * world_size
    )


@given(worlds=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])), steps=st.integers(0, 4))
@settings(max_examples=40)
def test_another_number_of_processes_goes_on_with_the_next_step(worlds, steps):
    before, after = worlds

    def loader(world_size, rank=0):
        return ResumableLoader(torch.arange(20), 2, 3, accumulate=2, rank=rank, world_size=world_size)

    def items(loaders, accumulated):
        rounds = zip(*[[b.tolist() for b in each] for each in loaders], strict=True)
        flat = [sorted(item for batch in turn for item in batch) for turn in rounds]
        return [sorted(chain(*flat[i : i + accumulated])) for i in range(0, len(flat), accumulated)]

    first = loader(before)
    for _, _batch in zip(range(steps * share_of(2, 2, before).accumulate), first, strict=False):
        pass
    later = [loader(after, rank) for rank in range(after)]
    for each in later:
        each.load_state_dict(first.state_dict())
    assert items(later, share_of(2, 2, after).accumulate) == items([loader(1)], 2)[steps:]
