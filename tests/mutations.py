"""python tests/mutations.py [FILE]: one fault at a time in a copy of the package, and which test notices it.

The faults are those of `mutants.py`, each tried in a process of its own with the tests that it names; what fails is
tried again without any fault, and must pass. What is found is kept in runs/mutations.json until the fault's file or its
tests change, so that a stopped command goes on. Ends with 1 where a fault goes unnoticed without a reason, and with 2
where an edit fits no longer.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TRITON_INTERPRET": "1"}

import pytest
from mutants import MUTANTS, Mutant

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
COPIED = ("focus_exp", "conf", "tests", "pyproject.toml", "README.md")
STATE = ROOT / "runs" / "mutations.json"
# what takes longest to import; a forked process has it
IMPORTED = (
    "torch",
    "transformers",
    "pytorch_lightning",
    "hydra",
    "datasets",
    "matplotlib.figure",
    "pandas",
    "hypothesis",
)
WORKERS, SECONDS = 2, 600  # of the processor
QUICK = "not gpu and not slurm and not slow and not real and not browser"
SURVIVED, DIED = "", f"tests that crash, or take over {SECONDS} s"
HEAD = """\
# Mutations

Made by `make mutations`: one fault at a time in a copy of the package, tried with the tests of `make test` that stand
closest to it, until one fails.

**{count} faults: {caught} caught, {excused} that no test could notice, {survived} survived.**

| in | fault | noticed by |
| --- | --- | --- |
"""


def edited(mutant: Mutant) -> str:
    """The file with the fault; SystemExit where its old text is not there once."""
    text = (ROOT / "focus_exp" / mutant.file).read_text(encoding="utf-8")
    if (times := text.count(mutant.old)) != 1:
        print(
            f"error: {mutant.file} has {mutant.old!r} {times} times, not once; mend tests/mutants.py", file=sys.stderr
        )
        raise SystemExit(2)
    return text.replace(mutant.old, mutant.new)


def key_of(mutant: Mutant) -> str:
    """Another one when the file with the fault, or a test that is to notice it, is another."""
    files = [TESTS / test.partition("::")[0] for test in mutant.tests]
    parts = [edited(mutant), *mutant.tests, *(path.read_text(encoding="utf-8") for path in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class FirstFailure:
    """Of a session of pytest: the name of the test."""

    name = SURVIVED

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.removeprefix("tests/")


def examine(copy: Path, tests: tuple[str, ...], sender: Connection) -> None:
    """Send what pytest ends with and the first test that fails; this process has not imported the package yet."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.alarm(6 * SECONDS)  # it may wait for nothing
    log = os.open(copy / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    paths = [str(copy), str(copy / "tests")]
    sys.path[:] = [*paths, *(path for path in sys.path if Path(path).resolve() not in (ROOT, TESTS))]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True  # of a fault it would outlive the fault
    first = FirstFailure()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk", "-m", QUICK]
    code = pytest.main([*options, *(f"tests/{test}" for test in tests)], [first])
    sender.send((int(code), first.name))


def begin(copy: Path, tests: tuple[str, ...]) -> tuple[multiprocessing.Process, Connection]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=examine, args=(copy, tests, sender))
    process.start()
    sender.close()
    return process, receiver


def ended(process: multiprocessing.Process, receiver: Connection) -> tuple[int, str]:
    """What `examine` sends."""
    try:
        return receiver.recv()
    except EOFError:
        return 1, DIED
    finally:
        process.join()


def copied(folder: Path) -> Path:
    """What the tests need, in `folder`."""
    folder.mkdir()
    for name in COPIED:
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, folder / name)
    (folder / "runs").mkdir()
    (folder / "runs" / "records").symlink_to(ROOT / "runs" / "records")
    return folder


def tried(mutants: list[Mutant], scratch: Path) -> Iterator[tuple[Mutant, str]]:
    """Each of them with the test that notices it, in the order in which they are done."""
    free = [copied(scratch / str(number)) for number in range(WORKERS)]
    todo, running = list(mutants), {}
    while todo or running:
        while todo and free:
            mutant, copy = todo.pop(0), free.pop()
            path = copy / "focus_exp" / mutant.file
            path.write_text(edited(mutant), encoding="utf-8")
            process, receiver = begin(copy, mutant.tests)
            running[receiver] = (mutant, copy, process)
        for receiver in wait(list(running)):
            mutant, copy, process = running.pop(receiver)
            code, name = ended(process, receiver)
            if code > 2 and not name:
                raise SystemExit(f"{mutant.file}: pytest ends with {code}:\n{(copy / 'log').read_text()[-2000:]}")
            shutil.copy2(ROOT / "focus_exp" / mutant.file, copy / "focus_exp" / mutant.file)
            free.append(copy)
            yield mutant, name


def without_any(tests: set[str], scratch: Path) -> str:
    """The first of these tests that fails without any fault."""
    copy = copied(scratch / "whole")
    code, name = ended(*begin(copy, tuple(sorted(tests))))
    return name or ("" if code == 0 else f"pytest, which ends with {code}")


def table(found: dict[str, str]) -> str:
    """Markdown."""
    outcomes = {mutant: found[key_of(mutant)] for mutant in MUTANTS}
    count = Counter("caught" if name else "excused" if mutant.why else "survived" for mutant, name in outcomes.items())
    head = HEAD.format(count=len(MUTANTS), **{key: count[key] for key in ("caught", "excused", "survived")})
    lines = [
        f"| {mutant.file} | {quoted(mutant.old)} → {quoted(mutant.new)} | {name or mutant.why or '**nothing**'} |"
        for mutant, name in outcomes.items()
    ]
    return head + "\n".join([*lines, ""])


def quoted(text: str) -> str:
    shown = " ".join(text.replace("|", "\\|").split())
    return f"`{shown}`" if shown else "nothing"


def main(path: Path) -> int:
    found = json.loads(STATE.read_text(encoding="utf-8")) if STATE.exists() else {}
    found = {key: found[key] for key in map(key_of, MUTANTS) if key in found}
    todo = [mutant for mutant in MUTANTS if key_of(mutant) not in found]
    for name in IMPORTED if todo else ():
        importlib.import_module(name)
    began, done = time.monotonic(), 0
    with TemporaryDirectory() as scratch:
        for mutant, name in tried(todo, Path(scratch)):
            found[key_of(mutant)] = name
            write(STATE, json.dumps(found, indent=1))
            done += 1
            left = (time.monotonic() - began) / done * (len(todo) - done)
            said = name or "SURVIVED"
            print(f"[{done}/{len(todo)}, {left:.0f} s left] {mutant.file} {quoted(mutant.new)}: {said}", flush=True)
        failing = set(found.values()) - {SURVIVED, DIED}
        if todo and (name := without_any(failing, Path(scratch))):
            write(STATE, json.dumps({key: other for key, other in found.items() if other != name}, indent=1))
            print(f"error: {name} fails without any fault, too; mend it", file=sys.stderr)
            return 2
    write(path, table(found))
    return int(any(not found[key_of(mutant)] and not mutant.why for mutant in MUTANTS))


def write(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
