"""A run that is stopped anywhere and started again ends with the numbers of one that never stopped."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import full_disk_at, metrics_of, only_run, outcome, record_of, router_steps, run, tiny

from focus_exp.errors import Interrupted, UserError
from focus_exp.evaluation import quality
from focus_exp.jobs.inputs import refuse_another, take_over
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record
from focus_exp.results.run_dir import NOT_ENDED
from focus_exp.speed import suite
from focus_exp.speed.suite import Suite
from focus_exp.training import callbacks
from focus_exp.training.callbacks import Checkpoint
from focus_exp.training.checkpoints import PARTS, Checkpoints, mend, read

STEPS = 45  # two epochs and a half of the tiny text
# checkpoints, log lines and epochs end at different steps
CADENCE = ("trainer.checkpoint_every=3", "trainer.log_every=2", "eval.max_sequences=2")
TWO_PHASES = (
    *("recipe=finetune", router_steps(4), "recipe.phases.everything.steps=7"),
    *("model=tiny_gpt2", "model.architecture.resid_pdrop=0.1"),  # whose training draws random numbers
)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the program runs to its end."""


def command(folder, runs, *more):
    return [*tiny(folder, runs), *CADENCE, *(more or (router_steps(STEPS),))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def uninterrupted(folder):
    assert run(*command(folder, "whole")).code == 0
    return outcome(folder / "whole")


@pytest.fixture(scope="module")
def uninterrupted_finetuning(folder):
    assert run(*command(folder, "whole-finetune", *TWO_PHASES)).code == 0
    return outcome(folder / "whole-finetune")


def test_a_finished_run_keeps_no_checkpoint_but_what_it_trained(folder, uninterrupted_finetuning):
    kept = {path.name for path in only_run(folder / "whole-finetune").iterdir()}
    assert "checkpoints" not in kept and {"adapter", "model"} <= kept


def send_while_training(folder, runs, signum, lines):
    """Start the command as a process, send it `signum` once its log has `lines` lines; exit code and stderr."""
    arguments = [sys.executable, "-m", "focus_exp", *command(folder, runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, text=True)
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if any(len(log.read_bytes().splitlines()) >= lines for log in (folder / runs).rglob("metrics.jsonl")):
                process.send_signal(signum)
                break
            time.sleep(0.005)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.slow
def test_kill_in_mid_training_changes_nothing(folder, uninterrupted):
    code, _ = send_while_training(folder, "killed", signal.SIGKILL, lines=12)
    assert code == -signal.SIGKILL
    assert 12 <= len(metrics_of(folder / "killed")) < STEPS // 2
    assert record_of(folder / "killed").status == "interrupted"
    assert run(*command(folder, "killed")).code == 0
    assert outcome(folder / "killed") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_leaves_a_checkpoint_and_says_so(folder, uninterrupted, signum):
    runs = signum.name
    code, err = send_while_training(folder, runs, signum, lines=8)
    assert code == 128 + signum
    assert f"stopped by {signum.name} at step" in err and "the same command goes on" in err
    assert "Traceback" not in err
    assert (only_run(folder / runs) / "checkpoints" / "router.ckpt").exists()
    record = record_of(folder / runs)
    assert record.status == "interrupted" and signum.name in record.error
    assert run(*command(folder, runs)).code == 0
    assert outcome(folder / runs) == uninterrupted


@pytest.mark.parametrize(
    "phase, step, politely",
    [
        ("router", 3, False),
        ("everything", 5, True),  # whose next steps draw random numbers
        ("router", 4, True),  # the last of its phase
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("everything", 7, True),
                *(("router", 1, True), ("router", 1, False), ("router", 3, True)),
                *(("everything", 1, True), ("everything", 1, False), ("everything", 5, False)),
            )
        ),
    ],
)
def test_every_phase_goes_on_where_it_was(folder, uninterrupted_finetuning, monkeypatch, phase, step, politely):
    runs = f"{phase}-{step}-{politely}"
    stop_at(monkeypatch, phase, step, politely)
    if politely:
        assert run(*command(folder, runs, *TWO_PHASES)).code == 128 + signal.SIGTERM
    else:
        with pytest.raises(Killed):
            run(*command(folder, runs, *TWO_PHASES))
    monkeypatch.undo()
    resumed = run(*command(folder, runs, *TWO_PHASES))
    assert resumed.code == 0 and ("going on from step" in resumed.out) == (step == 5 or (politely and step < 4))
    assert outcome(folder / runs) == uninterrupted_finetuning


def stop_at(monkeypatch, phase, step, politely):
    """SIGTERM (politely) or sudden death after optimiser step `step` of `phase`, before its checkpoint."""
    whole = Checkpoint.on_train_batch_end

    def batch_end(self, trainer, module, *rest):
        if (module.name, trainer.global_step) == (phase, step):
            if not politely:
                raise Killed
            if self.received is None:
                signal.raise_signal(signal.SIGTERM)
        whole(self, trainer, module, *rest)

    monkeypatch.setattr(Checkpoint, "on_train_batch_end", batch_end)


def test_stopped_evaluation_keeps_its_whole_rows(folder, uninterrupted, monkeypatch):
    scored = []
    score = quality.score

    def counted(*arguments):
        scored.append(arguments[-1])
        if stop and len(scored) == 4:
            signal.raise_signal(signal.SIGTERM)
        return score(*arguments)

    monkeypatch.setattr(quality, "score", counted)
    stop = True
    stopped = run(*command(folder, "evaluation"))
    assert stopped.code == 128 + signal.SIGTERM and "stopped by SIGTERM" in stopped.err
    assert record_of(folder / "evaluation").status == "interrupted"

    files = sorted((only_run(folder / "evaluation") / "evaluation").iterdir())
    assert len(files) == 3
    files[1].write_bytes(files[1].read_bytes()[:-300])
    left = files[2].with_name(f".{files[2].name}.4711.aside")
    left.write_bytes(files[2].read_bytes()[:300])
    first, scored[:], stop = scored[:3], [], False
    assert run(*command(folder, "evaluation")).code == 0
    assert not left.exists()
    rows = [row["name"] for row in uninterrupted["rows"]]
    again = [name for name in first if name in scored]
    assert len(again) == 1
    assert sorted(scored) == sorted([*again, *(name for name in rows if name not in first)])
    assert outcome(folder / "evaluation") == uninterrupted


def test_full_disk_never_leaves_half_a_checkpoint(folder, uninterrupted, monkeypatch):
    whole = full_disk_at(monkeypatch, 3)
    failed = run(*command(folder, "full"))
    monkeypatch.undo()
    assert failed.code == 2
    assert "No space left on device; free some space" in failed.err
    checkpoints = only_run(folder / "full") / "checkpoints"
    assert {path.name: path.read_bytes() for path in checkpoints.iterdir()} == {
        "router.ckpt": whole[1], "router.ckpt.before": whole[0],
    }  # fmt: skip
    record = record_of(folder / "full")
    assert record.status == "failed" and "No space left" in record.error

    with (only_run(folder / "full") / "metrics.jsonl").open("a") as log:
        log.write('{"phase": "router", "st')
    assert run(*command(folder, "full")).code == 0
    assert outcome(folder / "full") == uninterrupted


DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "text": lambda content: b"hello world" * 10,
    "a flipped bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "a program": lambda content: pickled_program(),
}


def pickled_program():
    content = io.BytesIO()
    torch.save({"state_dict": Path("somewhere")}, content)  # any class that is no plain data
    return content.getvalue()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_stands_in(tmp_path, kind):
    path = tmp_path / "router.ckpt"
    states = [{part: [number] for part in PARTS} | {"numbers": torch.randn(2000)} for number in range(3)]
    for state in states:
        Checkpoints().save_checkpoint(state, path)
    assert mend(tmp_path) == [] and read(path)["loops"] == [2]
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    (said,) = mend(tmp_path)
    assert str(path) in said and "is damaged" in said and said.endswith("the one before it is used")
    assert read(path)["loops"] == [1] and mend(tmp_path) == []
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    (said,) = mend(tmp_path)
    assert said.endswith("its phase starts again") and not path.exists()


@pytest.mark.parametrize("left, said", [(1, "the one before it is used"), (0, "its phase starts again")])
def test_a_run_goes_on_from_what_is_whole(folder, uninterrupted, monkeypatch, left, said):
    runs = f"damaged-{left}"
    stop_at(monkeypatch, "router", 20, politely=True)
    assert run(*command(folder, runs)).code == 128 + signal.SIGTERM
    monkeypatch.undo()
    newest, older = sorted((only_run(folder / runs) / "checkpoints").iterdir())
    for path in (newest, older)[: 2 - left]:
        path.write_bytes(path.read_bytes()[:-100])
    again = run(*command(folder, runs))
    assert again.code == 0 and f"WARNING: the checkpoint {newest} is damaged" in again.err and said in again.err
    assert record_of(folder / runs).warnings[0] in again.err
    assert outcome(folder / runs) == uninterrupted


def test_a_signal_that_comes_while_processes_agree_is_not_lost(monkeypatch, tmp_path):
    checkpoint, saved = callbacks.Checkpoint(tmp_path / "last.ckpt", every=100), []

    def agreeing(received):
        checkpoint._receive(signal.SIGUSR2, None)  # after what this process has to say was asked
        return received

    monkeypatch.setattr(callbacks, "any_of", agreeing)
    fit_loop = SimpleNamespace(_should_accumulate=lambda: False)
    trainer: Any = SimpleNamespace(fit_loop=fit_loop, global_step=3, max_steps=9, save_checkpoint=saved.append)
    module: Any = None
    checkpoint.on_train_batch_end(trainer, module, None, None, 0)
    assert saved == []  # the others know nothing of it yet
    with pytest.raises(Interrupted, match="at step 3 of 9"):
        checkpoint.on_train_batch_end(trainer, module, None, None, 1)
    assert saved == [tmp_path / "last.ckpt"]


def test_a_run_takes_over_what_its_earlier_part_read_and_spent(tmp_path):
    made = {"experiment": "mine", "machine": {"cpu": "one"}, "device": "cpu"}
    earlier = Record(status="interrupted", commit="a", wall_seconds=3.0, train_seconds=2.0, warnings=["first"], **made)
    earlier.model, earlier.peak_memory_bytes = {"fingerprint": "weights"}, 4
    record = Record(status="interrupted", commit="b", warnings=["second"], **made)
    assert take_over(record, earlier, tmp_path) == []  # nothing is left of it that another commit has made
    assert (record.wall_seconds, record.train_seconds, record.warnings) == (3.0, 2.0, ["first", "second"])
    assert (record.model, record.peak_memory_bytes) == (earlier.model, 4)
    (tmp_path / "evaluation").mkdir()
    assert take_over(record, earlier, tmp_path) == ["begun with commit a (now b): its numbers are of both"]
    killed = replace(earlier, commit="b", error=NOT_ENDED)
    assert [said.partition(":")[0] for said in take_over(record, killed, tmp_path)] == [
        "an earlier part of it was killed"
    ]
    made_anew = Record(status="interrupted", commit="b", **made)
    assert take_over(made_anew, replace(earlier, status="finished"), tmp_path) == []
    assert made_anew.wall_seconds is None


@pytest.mark.parametrize("part, mixed", [("continuations", True), ("groups", True), ("speed", False)])
def test_a_run_whose_kept_parts_another_commit_made_says_so_unless_they_are_made_anew(tmp_path, part, mixed):
    (tmp_path / part).mkdir()
    killed = Record(status="interrupted", experiment="mine", commit="a", error=NOT_ENDED)
    said = [each.partition(" ")[0] for each in take_over(replace(killed, commit="b"), killed, tmp_path)]
    assert said == ["begun"] * mixed + ["an"]


@pytest.mark.parametrize("other", ["commit", "cpu_name", "device_name"])
def test_a_clock_is_kept_for_the_processor_and_the_commit_that_it_is_of(tmp_path, monkeypatch, other):
    made: Any = SimpleNamespace(folder=tmp_path, precision=SimpleNamespace(device=torch.device("cpu")))
    measured = []

    def measure():
        measured.append(Measurement(variant="focus", metric="speedup", value=float(len(measured))))
        return measured[-1:]

    for _ in range(2):
        assert Suite.keep(made, "attention-48", measure) == measured[:1]
    monkeypatch.setattr(suite, other, lambda *_: "another")
    for _ in range(2):
        assert Suite.keep(made, "attention-48", measure) == measured[1:]
    assert len(measured) == 2


def test_a_run_does_not_go_on_with_other_weights_or_another_tokenizer(tmp_path):
    refuse_another("model", {}, "b", tmp_path)
    refuse_another("model", {"fingerprint": "b"}, "b", tmp_path)
    with pytest.raises(UserError, match="the weights have changed since .* overwrite=true"):
        refuse_another("model", {"fingerprint": "a"}, "b", tmp_path)
    with pytest.raises(UserError, match="the text, or the tokenizer, has changed"):
        refuse_another("data", {"fingerprint": "a"}, "b", tmp_path)
