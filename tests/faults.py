"""python tests/faults.py FILE: do to tiny runs what machines and people do to long ones, and write what became of them.

Ends with 1 where a command printed a stack trace, ended with another code than it should, or lost anything.
"""

import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import fault_rows as faults
from bad_files import bad_files, refused
from bad_input import BAD_INPUT, CHOICES
from fault_rows import Bench, Row
from stopped import CALLS, STAGES

from focus_exp.results.environment import environment

AT_ONCE = 2
VERSIONS = ("torch", "transformers", "pytorch_lightning", "hydra-core")
SIGNALS = {
    signal.SIGKILL: STAGES,
    signal.SIGTERM: (*CALLS, "a checkpoint is written", "the trained base is written", "the table is written"),
}
BAD_SETTINGS = (*BAD_INPUT, *(f"{key}=nonsense" for key in CHOICES))
HEAD = """\
# Faults and bad input

Made by `make faults` from nothing but this repository: every row is one or more commands `python -m focus_exp ...`, in
processes of their own, on a random GPT-2 of two layers and generated text, {place}. A fault is put right and the same
command given again; its final record (numbers, findings, training log, saved weights) is compared with that of an
undisturbed twin.

**{count} rows: {survived} survived with the undisturbed record, {refused} refused in one sentence with exit code 2,
{traces} with a stack trace, {lost} with anything lost.** {note}
"""


def rows(bench: Bench) -> list[Callable[[], Row]]:
    """All of them, not yet run."""
    made: list[Callable[[], Row]] = [
        lambda stage=stage, signum=signum: faults.stopped(bench, stage, signum)
        for signum, stages in SIGNALS.items()
        for stage in stages
    ]
    made += [
        lambda: faults.damaged(bench, "the newest checkpoint", "everything.ckpt"),
        lambda: faults.damaged(bench, "both checkpoints of a phase", "everything.ckpt*", newest=2),
        lambda: faults.damaged(bench, "the checkpoint of the first phase", "router.ckpt"),
        lambda: faults.damaged(bench, "the losses of the base", "base_full_attention.npz"),
        lambda: faults.damaged(bench, "the token cache", "train.bin"),
        lambda: faults.damaged(bench, "the record", "record.json", refused=True),
        lambda: faults.two_at_once(bench),
        lambda: faults.clock_back(bench),
        lambda: faults.file_size_limit(bench),
    ]
    made += [
        lambda variables=variables: faults.launcher_variables(bench, variables)
        for variables in ({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "zero", "WORLD_SIZE": "2"})
    ]
    made += [
        lambda name=name: faults.literal_path(bench, name) for name in ("br[1]", "caf\u00e9 {a,b}", "it's #1 (x=y)")
    ]
    if can_mount():
        own = faults.on_own_disk
        made += [
            lambda: own(bench, "a full disk, at once", "full-0", "runs_dir", faults.fill(0)),
            lambda: own(bench, "a full disk, at a checkpoint", "full-1", "runs_dir", faults.fill(1_500_000)),
            lambda: own(bench, "a full disk, at a later checkpoint", "full-2", "runs_dir", faults.fill(3_000_000)),
            lambda: own(bench, "a full disk, in the token cache", "full-3", "cache_dir", faults.fill(8_192)),
            lambda: own(bench, "a read-only disk for runs", "read-only-1", "runs_dir", faults.read_only),
            lambda: own(bench, "a read-only disk for the cache", "read-only-2", "cache_dir", faults.read_only),
            lambda: faults.finished_on_a_read_only_disk(bench),
        ]
    made += bad_files(bench)
    made += [lambda setting=setting: refused(bench, f"`{setting}`", setting) for setting in BAD_SETTINGS]
    return made


def can_mount() -> bool:
    return os.geteuid() == 0 and platform.system() == "Linux"


def table(done: list[Row]) -> str:
    """Markdown."""
    known = environment()["versions"]
    versions = ", ".join(f"{name} {known[name]}" for name in VERSIONS if name in known)
    note = "" if can_mount() else "Full and read-only disks were left out: to mount one takes root."
    text = HEAD.format(
        place=f"under Python {platform.python_version()}, {versions}",
        count=len(done),
        survived=sum(row.survived and row.equal is True for row in done),
        refused=sum(not row.survived for row in done),
        traces=sum(any("stack trace" in problem for problem in row.problems) for row in done),
        lost=sum(row.equal is False for row in done),
        note=note,
    )
    lines = ["| tried | outcome | what it said | final record equal |", "| --- | --- | --- | --- |"]
    for row in done:
        equal = {True: "yes", False: "NO", None: "-"}[row.equal]
        said = " ".join(row.said.replace("|", "\\|").replace("<", "&lt;").split())
        lines.append(f"| {row.tried} | {'survived' if row.survived else 'refused'} | {said or '-'} | {equal} |")
    return "\n".join([text.rstrip(), "", *lines, ""])


def main(path: Path) -> int:
    began = time.monotonic()
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
        bench = Bench(Path(scratch))
        bench.make_twin()
        done = []
        for row in pool.map(lambda work: work(), rows(bench)):
            done.append(row)
            print(f"{time.monotonic() - began:4.0f} s  {'; '.join(row.problems) or 'ok':<4} {row.tried}: {row.said}")
    failed = [row for row in done if row.problems]
    if failed:
        print(f"{len(failed)} of {len(done)} rows failed; {path} is left as it was", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(done), encoding="utf-8")
    return 0


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.exit(main(Path(sys.argv[1])))
