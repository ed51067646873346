"""A run that is stopped anywhere and repeated ends with the numbers of one that never stopped."""

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from builders import Killed, stop_training
from builders import scored as scored_variants
from running import fitting, full_disk_at, only_run, outcome, record_of, router_steps, run, tiny

from focus_exp.errors import Interrupted, UserError
from focus_exp.evaluation import perplexity
from focus_exp.results.record import Record
from focus_exp.runs.resume import check_fingerprint, resume_record
from focus_exp.training import callbacks
from focus_exp.training.callbacks import PROBES, Checkpoint
from focus_exp.training.checkpoints import CheckpointIO, minutes_between, read_checkpoint, remove_damaged

STEPS = 45  # two epochs and a half of the tiny text
# checkpoints, log lines and epochs end at different steps
CADENCE = ("trainer.checkpoint_every=3", "trainer.log_every=2", "eval.max_sequences=1")
TWO_PHASES = (
    *("recipe=finetune", router_steps(4), "recipe.phases.everything.steps=7"),
    *("model=tiny_gpt2", "model.architecture.resid_pdrop=0.1"),  # its training draws random numbers
)
SIGTERM_CODE = 128 + signal.SIGTERM


def command(folder, runs, *more):
    return [*tiny(folder, runs), *CADENCE, *(more or (router_steps(STEPS),))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def expected(folder):
    assert run(*command(folder, "uninterrupted")).code == 0
    return outcome(folder / "uninterrupted")


@pytest.fixture(scope="module")
def expected_finetune(folder):
    assert run(*command(folder, "uninterrupted-finetune", *TWO_PHASES)).code == 0
    return outcome(folder / "uninterrupted-finetune")


def test_finished_run_removes_checkpoints_and_keeps_weights(folder, expected_finetune):
    names = {path.name for path in only_run(folder / "uninterrupted-finetune").iterdir()}
    assert "checkpoints" not in names
    assert {"adapter", "model"} <= names


@pytest.mark.parametrize(
    ("phase", "step", "signum"),
    [
        ("router", 3, None),
        ("everything", 5, None),  # its next steps draw random numbers
        ("router", 4, signal.SIGTERM),  # the last of its phase
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("everything", step, signal.SIGTERM) for step in (1, 5, 7)), ("everything", 1, None),
                *(("router", step, signal.SIGTERM) for step in (1, 3)), ("router", 1, None),
            )
        ),
    ],
)  # fmt: skip
def test_stopped_phase_resumes_to_the_same_numbers(folder, expected_finetune, monkeypatch, phase, step, signum):
    runs = f"{phase}-{step}-{signum}"
    with monkeypatch.context() as patch:
        stop_training(patch, step, phase, signum)
        if signum:
            assert run(*command(folder, runs, *TWO_PHASES)).code == SIGTERM_CODE
        else:
            with pytest.raises(Killed):
                run(*command(folder, runs, *TWO_PHASES))
    assert run(*command(folder, runs, *TWO_PHASES)).code == 0
    assert outcome(folder / runs) == expected_finetune
    probes = [(only_run(folder / name) / PROBES).read_bytes() for name in (runs, "uninterrupted-finetune")]
    assert probes[0] == probes[1]


def test_signal_during_a_collective_stops_at_the_next_step(monkeypatch, tmp_path):
    checkpoint, saved = Checkpoint(tmp_path / "last.ckpt", every=100), []

    def all_gather_object(value):
        checkpoint.receive(signal.SIGUSR2, None)  # after this process's value was read
        return [value]

    monkeypatch.setattr(callbacks, "all_gather_object", all_gather_object)
    trainer: Any = SimpleNamespace(global_step=3, max_steps=9, save_checkpoint=saved.append)
    module: Any = None
    checkpoint.on_train_batch_end(trainer, module, None, None, 0)
    assert saved == []
    with pytest.raises(Interrupted, match="3 of 9"):
        checkpoint.on_train_batch_end(trainer, module, None, None, 1)
    assert saved == [tmp_path / "last.ckpt"]


def test_stopped_evaluation_keeps_its_complete_rows(folder, expected, monkeypatch):
    scored = []
    score = perplexity.score

    def trained():
        return only_run(folder / "evaluation") / "adapter" / "focus_adapter.safetensors"

    def counted(*arguments):
        if trained().exists():  # not of the table before training
            scored.append(arguments[-1])
        if stop and len(scored) == 4:
            signal.raise_signal(signal.SIGTERM)
        return score(*arguments)

    monkeypatch.setattr(perplexity, "score", counted)
    stop = True
    assert run(*command(folder, "evaluation")).code == SIGTERM_CODE
    assert record_of(folder / "evaluation").status == "interrupted"

    written = (only_run(folder / "evaluation") / "evaluation").rglob("*.npz")
    files = sorted(path for path in written if path.stat().st_mtime_ns > trained().stat().st_mtime_ns)
    assert len(files) == 3
    files[1].write_bytes(files[1].read_bytes()[:-300])
    temporary = files[2].with_name(f".{files[2].name}.4711.aside")
    temporary.write_bytes(files[2].read_bytes()[:300])
    first, scored[:], stop = scored[:3], [], False
    assert run(*command(folder, "evaluation")).code == 0
    assert not temporary.exists()
    repeated = [name for name in first if name in scored]
    assert len(repeated) == 1
    shared = {"base", "window_only"}  # with other runs, and with the table before training
    rows = [row.name for row in scored_variants(expected["measured"]) if row.name not in shared]
    assert sorted(scored) == sorted([*repeated, *(name for name in rows if name not in first)])
    assert outcome(folder / "evaluation") == expected


def test_table_says_how_far_a_run_is(tmp_path, monkeypatch):
    settings = [*fitting(*tiny(tmp_path), "attention=window", "recipe=none"), "eval.seq_len=16"]
    score, tables = perplexity.score, []

    def stop_after_a_table(*arguments):
        if paths := [*tmp_path.rglob("table.md")]:
            tables.append(paths[0].read_text())
            signal.raise_signal(signal.SIGTERM)
        return score(*arguments)

    monkeypatch.setattr(perplexity, "FIRST_ROUND", 1)
    with monkeypatch.context() as patch:
        patch.setattr(perplexity, "score", stop_after_a_table)
        assert run(*settings).code == SIGTERM_CODE
    assert "status: running, 1 of 3 sequences scored" in tables[0]
    table = only_run(tmp_path) / "table.md"
    assert "status: interrupted, stopped by SIGTERM" in table.read_text()
    assert run(*settings).code == 0
    assert "status: finished" in table.read_text()
    table.unlink()  # as if it had been killed before the table
    assert "already finished" in run(*settings).out and table.exists()


def test_full_disk_leaves_complete_checkpoints(folder, expected, monkeypatch):
    complete = full_disk_at(monkeypatch, 3)
    failed = run(*command(folder, "full"))
    monkeypatch.undo()
    assert failed.code == 2
    assert "No space left on device" in failed.err
    checkpoints = only_run(folder / "full") / "checkpoints"
    contents = {path.name: path.read_bytes() for path in checkpoints.iterdir()}
    assert contents == {"router.ckpt": complete[1], "router.previous.ckpt": complete[0]}
    assert record_of(folder / "full").status == "failed"
    with (only_run(folder / "full") / "metrics.jsonl").open("a") as log:
        log.write('{"phase": "router", "st')
    assert run(*command(folder, "full")).code == 0
    assert outcome(folder / "full") == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"hello world" * 10,
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    ],
    ids=["truncated", "empty", "text", "flipped bit"],
)
def test_damaged_checkpoint_is_removed_with_those_of_later_phases(tmp_path, damage):
    for phase in ("router", "everything", "last"):
        state = {"loops": [phase], "numbers": torch.randn(2000)}
        CheckpointIO().save_checkpoint(state, tmp_path / f"{phase}.ckpt")
    phases = ["router", "everything", "last"]
    assert remove_damaged(tmp_path, phases) == []
    path = tmp_path / "everything.ckpt"
    assert read_checkpoint(path)["loops"] == ["everything"]
    path.write_bytes(damage(path.read_bytes()))
    (warning,) = remove_damaged(tmp_path, phases)
    assert str(path) in warning
    assert [child.name for child in tmp_path.iterdir()] == ["router.ckpt"]


def test_checkpoint_before_replaces_a_damaged_or_missing_one(tmp_path):
    path, steps = tmp_path / "router.ckpt", lambda: {p.name: read_checkpoint(p)["step"] for p in tmp_path.iterdir()}
    for step in (1, 2, 3):
        CheckpointIO().save_checkpoint({"step": step}, path)
    assert steps() == {"router.ckpt": 3, "router.previous.ckpt": 2}
    path.unlink()  # killed between two renames
    assert remove_damaged(tmp_path, ["router"]) == []
    assert steps() == {"router.ckpt": 2}
    CheckpointIO().save_checkpoint({"step": 3}, path)
    CheckpointIO().save_checkpoint({"step": 1}, tmp_path / "everything.ckpt")
    path.write_bytes(path.read_bytes()[:-9])
    (warning,) = remove_damaged(tmp_path, ["router", "everything"])
    assert str(path) in warning and steps() == {"router.ckpt": 2}


def test_checkpoint_waits_for_its_minutes(monkeypatch, tmp_path):
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: 60.0 * trainer.global_step)  # a step a minute
    saved: list[int] = []
    trainer: Any = SimpleNamespace(global_step=0, max_steps=200)
    trainer.save_checkpoint = lambda _: saved.append(trainer.global_step)
    checkpoint, module = Checkpoint(tmp_path / "last.ckpt", every=25, minutes=60), Mock()
    for trainer.global_step in range(1, 201):
        if trainer.global_step == 110:
            checkpoint.received = signal.SIGTERM
            with pytest.raises(Interrupted):
                checkpoint.on_train_batch_end(trainer, module)
            checkpoint.received = 0
        else:
            checkpoint.on_train_batch_end(trainer, module)
    assert saved == [75, 110, 175, 200]  # every 25, an hour apart; a signal and the end at once


@pytest.mark.parametrize(
    ("configured", "trained", "minutes"),
    [(None, 148_224, 0), (None, 6_000_000, 0), (None, 7_241_732_096, 60), (0.0, 7_241_732_096, 0), (5.0, 1000, 5)],
)
def test_checkpoints_of_large_models_are_an_hour_apart(configured, trained, minutes):
    assert minutes_between(configured, trained) == minutes


def test_run_with_a_damaged_checkpoint_gives_the_same_numbers(folder, expected, monkeypatch):
    with monkeypatch.context() as patch:
        stop_training(patch, 20)
        assert run(*command(folder, "damaged")).code == SIGTERM_CODE
    path = only_run(folder / "damaged") / "checkpoints" / "router.ckpt"
    before = read_checkpoint(path.with_name("router.previous.ckpt"))
    assert (before["global_step"], read_checkpoint(path)["global_step"]) == (18, 20)
    path.write_bytes(path.read_bytes()[:-100])
    assert run(*command(folder, "damaged")).code == 0
    assert str(path) in record_of(folder / "damaged").warnings[0]
    assert outcome(folder / "damaged") == expected


def test_resumed_record_adds_up_times_and_warnings(tmp_path):
    machine = {"experiment": "mine", "machine": {"cpu": "one"}, "device": "cpu"}
    earlier = Record(status="interrupted", commit="a", wall_seconds=3.0, train_seconds=2.0, warnings=["1"], **machine)
    earlier.model, earlier.peak_memory_bytes = {"fingerprint": "weights"}, 4
    record = Record(status="running", commit="b", warnings=["2"], **machine)
    assert resume_record(record, earlier, tmp_path) == []  # nothing of another commit is left
    assert (record.wall_seconds, record.train_seconds, record.warnings) == (3.0, 2.0, ["1", "2"])
    assert (record.model, record.peak_memory_bytes) == (earlier.model, 4)
    (tmp_path / "evaluation").mkdir()
    killed = replace(earlier, commit="b", status="running")
    assert len(resume_record(record, killed, tmp_path)) == 1
    repeated = Record(status="running", commit="b", **machine)
    assert resume_record(repeated, replace(earlier, status="finished"), tmp_path) == []
    assert repeated.wall_seconds is None


def test_resumed_record_warns_of_results_of_another_commit(tmp_path):
    (tmp_path / "evaluation").mkdir()
    earlier = Record(status="interrupted", experiment="mine", commit="a")
    assert len(resume_record(replace(earlier, commit="b"), earlier, tmp_path)) == 1


@pytest.mark.parametrize("part", ["model", "data"])
def test_resume_with_other_weights_or_text_is_refused(tmp_path, part):
    check_fingerprint(part, {}, "b", tmp_path)
    check_fingerprint(part, {"fingerprint": "b"}, "b", tmp_path)
    with pytest.raises(UserError, match="overwrite=true"):
        check_fingerprint(part, {"fingerprint": "a"}, "b", tmp_path)
