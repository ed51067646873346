"""Atomic writes, file locks, and two commands in one run folder."""

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
from builders import write_variants
from running import fitting, only_run, record_of, run, succeed, tiny

from focus_exp.errors import UserError
from focus_exp.jobs import compare as compare_module
from focus_exp.jobs import train as train_module
from focus_exp.results.record import Record
from focus_exp.runs.open import open_run
from focus_exp.storage import InUse, atomic_write, file_lock, remove_stale_temp, replace_file

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


def read_all(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def hold_lock(lock, kind="alone"):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, lock, kind], stdout=subprocess.PIPE, text=True)
    return holder, *map(int, holder.stdout.readline().split())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_atomic_write_replaces_all_or_nothing(tmp_path, kind):
    path = tmp_path / "below" / "it"

    def write(content):
        with atomic_write(path) as temporary:
            if kind == "file":
                temporary.write_text(content)
            else:
                temporary.mkdir()
                (temporary / content).write_text(content)
            if content == "3":
                raise OSError(errno.ENOSPC, "No space left on device")

    for content in "12":
        write(content)
        assert read_all(tmp_path) == {f"below/it{'' if kind == 'file' else f'/{content}'}": content}
    with pytest.raises(OSError) as caught:
        write("3")
    assert caught.value.filename == str(path)
    assert list(read_all(tmp_path).values()) == ["2"]
    assert len(list(path.parent.iterdir())) == 1


def test_remove_stale_temp_keeps_complete_files(tmp_path):
    replace_file(tmp_path / "a" / ".record.json.4711.aside", b"half")
    (tmp_path / "a" / ".folder.old-4711.aside").mkdir()
    replace_file(tmp_path / "a" / "kept", b"complete")
    remove_stale_temp(tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


@pytest.mark.parametrize("kind", ["alone", "worker"])
def test_file_lock_names_its_holder_and_ends_with_it(tmp_path, kind):
    lock = tmp_path / "lock"
    holder, process, worker = hold_lock(lock, kind)
    try:
        with pytest.raises(InUse, match=str(process)), file_lock(lock, "it"):
            pass
        holder.kill()
        holder.wait()
        with file_lock(lock, "it"):
            assert str(os.getpid()) in lock.read_text()
        assert not lock.exists()
    finally:
        holder.kill()
        if worker:
            os.kill(worker, signal.SIGKILL)


def test_file_lock_waits_for_its_holder(tmp_path):
    holder, *_ = hold_lock(tmp_path / "lock")
    threading.Timer(0.3, holder.kill).start()
    with file_lock(tmp_path / "lock", "it", wait=True):
        assert holder.wait() == -signal.SIGKILL


def test_file_lock_without_file_system_support_raises_user_error(tmp_path, monkeypatch):
    unsupported = OSError(errno.EOPNOTSUPP, "Operation not supported")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=unsupported))
    with pytest.raises(UserError, match="runs_dir="), file_lock(tmp_path / "lock", "it"):
        pass


def test_second_command_in_a_run_folder_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    prepare, refused = train_module.prepare, []

    def intrude(first):
        before = read_all(first.folder)
        for overwrite in (False, True):
            with pytest.raises(InUse, match=str(first.folder)):
                open_run(replace(first.config, overwrite=overwrite)).__enter__()
            refused.append(overwrite)
        assert read_all(first.folder) == before
        return prepare(first)

    monkeypatch.setattr(train_module, "prepare", intrude)
    succeed(*fitting(*tiny(tmp_path), "attention=window", "recipe=none"), "overwrite=true")
    assert refused == [False, True]
    assert record_of(tmp_path).status == "finished"
    folder = only_run(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
def test_comparison_stops_at_a_variant_in_use(tmp_path):
    variants = {name: [f"attention={name}", "recipe=none"] for name in ("window", "sparq")}
    command = ["job=compare", *write_variants(tmp_path / "conf", variants)]
    command += [setting for setting in tiny(tmp_path) if not setting.startswith("attention.")]
    succeed(*command, "+variant=adhoc/window")
    done = only_run(tmp_path)
    with file_lock(done.with_name(f".{done.name}.lock"), "it"):
        result = run(*command, "overwrite=true")
    assert result.code == 2
    assert str(done) in result.err
    assert Record.load(done / "record.json").status == "finished"
    succeed(*command)


def test_second_comparison_is_refused_before_any_variant(tmp_path, monkeypatch):
    compare, run_variants = Mock(wraps=compare_module.compare), compare_module.run_variants

    def intrude(variants):
        with pytest.raises(InUse, match="compare"):
            compare(*compare.call_args.args)
        return run_variants(variants)

    monkeypatch.setattr(compare_module, "compare", compare)
    monkeypatch.setattr(compare_module, "run_variants", intrude)
    succeed(*tiny(tmp_path), "job=compare", "variants=[compare/window]")
    assert compare.call_count == 2
