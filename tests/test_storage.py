"""Whole or not there, and one writer at a time: files, folders, locks, and two commands in one run folder."""

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from builders import write_variants
from running import fitting, only_run, record_of, router_steps, run, tiny
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from focus_exp.errors import UserError
from focus_exp.jobs import compare as compare_module
from focus_exp.jobs import train as train_module
from focus_exp.jobs.run import open_run
from focus_exp.results.record import Record
from focus_exp.storage import InUse, atomic_write, file_lock, is_locked, remove_stale_temp, replace_file

STEPS = router_steps(4)
HOLDER = """
import os, sys, time
from pathlib import Path
from focus_exp.storage import file_lock
with file_lock(Path(sys.argv[1]), "it"):
    worker = os.fork() if sys.argv[2] == "worker" else 0
    if worker or sys.argv[2] == "alone":
        print(os.getpid(), worker, flush=True)
    time.sleep(60)
"""


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_written_aside_takes_its_place_whole(tmp_path, kind):
    path = tmp_path / "below" / "it"

    def write(number):
        with atomic_write(path) as new:
            if kind == "file":
                new.write_text(number)
            else:
                new.mkdir()
                (new / number).write_text(number)
            if number == "3":
                raise OSError(errno.ENOSPC, "No space left on device")
            assert contents(tmp_path).keys() > before.keys()

    for number in "12":
        before = contents(tmp_path)
        write(number)
        assert contents(tmp_path) == {f"below/it{'' if kind == 'file' else f'/{number}'}": number}
    with pytest.raises(OSError, match="No space") as caught:
        write("3")
    assert caught.value.filename == str(path)
    assert list(contents(tmp_path).values()) == ["2"] and len(list(path.parent.iterdir())) == 1


def test_safetensors_full_disk_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, atomic_write(tmp_path / "it") as new:
        new.touch()
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_what_a_killed_process_left_aside_is_cleared(tmp_path):
    left = tmp_path / "a" / ".record.json.4711.aside"
    replace_file(left, b"half")
    (tmp_path / "a" / ".folder.old-4711.aside").mkdir()
    replace_file(tmp_path / "a" / "kept", b"whole")
    remove_stale_temp(tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


@pytest.mark.parametrize("kind", ["alone", "worker"])
def test_a_lock_names_its_holder_and_ends_with_it(tmp_path, kind):
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, lock, kind], stdout=subprocess.PIPE, text=True)
    process, worker = map(int, holder.stdout.readline().split())
    try:
        assert is_locked(lock)
        message = rf"it is in use by process {process} on .* since 20"
        with pytest.raises(InUse, match=message), file_lock(lock, "it"):
            pass
        holder.kill()
        holder.wait()
        assert not is_locked(lock)
        with file_lock(lock, "it"):
            assert is_locked(lock) and str(os.getpid()) in lock.read_text()
        assert not lock.exists()
    finally:
        holder.kill()
        if worker:
            os.kill(worker, signal.SIGKILL)


def test_who_waits_for_a_lock_gets_it(tmp_path):
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, lock, "alone"], stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    threading.Timer(0.3, holder.kill).start()
    with file_lock(lock, "it", wait=True):
        assert holder.wait() == -signal.SIGKILL


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    with (
        pytest.raises(UserError, match="runs_dir="),
        file_lock(tmp_path / "lock", "it"),
    ):
        pass


def test_a_second_command_in_a_run_folder_is_refused_and_disturbs_nothing(tmp_path, monkeypatch):
    load, refused = train_module.load, []

    def intrude(first, precision):
        before = contents(first.folder)
        for overwrite in (False, True):
            second = open_run(replace(first.config, overwrite=overwrite), "cpu")
            with (
                pytest.raises(InUse, match=f"run folder {first.folder} is in use by process {os.getpid()} on "),
                second,
            ):
                pass
            refused.append(overwrite)
        assert contents(first.folder) == before
        return load(first, precision)

    monkeypatch.setattr(train_module, "load", intrude)
    assert run(*tiny(tmp_path), STEPS, "overwrite=true").code == 0
    assert refused == [False, True] and record_of(tmp_path).status == "finished"
    folder = only_run(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
def test_a_comparison_stops_at_an_arm_that_another_command_runs(tmp_path):
    variants = {name: ["attention=window", "recipe=none"] for name in ("one", "two")}
    command = [*tiny(tmp_path), "job=compare", *write_variants(tmp_path / "conf", variants)]
    assert run(*command, "+variant=adhoc/one").code == 0
    done = only_run(tmp_path)
    with file_lock(done.with_name(f".{done.name}.lock"), "it"):
        result = run(*command, "overwrite=true")
    assert result.code == 2 and f"error: the run folder {done} is in use by process {os.getpid()}" in result.err
    assert Record.load(done / "record.json").status == "finished"
    assert run(*command).code == 0


def test_two_comparisons_at_once_are_refused_before_any_arm(tmp_path, monkeypatch):
    compare, run_arms, seen = compare_module.compare, compare_module.run_arms, []

    def remember(config):
        seen.append(config)
        compare(config)

    def intrude(configs, comparison):
        with pytest.raises(InUse, match="run folder .*compare.* is in use by"):
            compare(seen[0])
        return run_arms(configs, comparison)

    monkeypatch.setattr(compare_module, "compare", remember)
    monkeypatch.setattr(compare_module, "run_arms", intrude)
    assert run(*tiny(tmp_path), "job=compare", "variants=[compare/window]").code == 0
    assert len(seen) == 1


def test_weights_of_a_finetune_are_whole_or_not_there(tmp_path, monkeypatch):
    command = fitting(*tiny(tmp_path), "recipe=finetune", "attention=full", "recipe.phases.everything.steps=1")
    save = PreTrainedTokenizerBase.save_pretrained

    def full(self, folder, **options):
        assert (Path(folder) / "model.safetensors").exists()
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    assert run(*command).code == 2
    names = {path.name for path in only_run(tmp_path).iterdir()}
    assert "checkpoints" in names and not [name for name in names if "model" in name]
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save)
    assert run(*command).code == 0
    AutoModelForCausalLM.from_pretrained(only_run(tmp_path) / "model")
