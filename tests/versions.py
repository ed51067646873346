"""python tests/versions.py FILE RECORDS WORK [COMMIT]: does today's code do what the code of each published run did?

Every published arm is run at `scale=quick`, once by the commit of its record and once by COMMIT, the one checked out
if none is given, and the losses of both are compared. What is finished stays below WORK and is not run again.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from replications import differences

from focus_exp.records.losses import LOSSES
from focus_exp.records.record import Record

HEAD = """\
# Published arms by the code of their records and by a later version

Made by `make versions`, of every arm that was published then: at `scale=quick` (one to ten steps, two windows, a fit
and a warm start of ten steps, no other learning rates), once by the commit that its record names and once by
`{commit}`, on one processor. The largest difference of a window's (or an item's) loss in nats a token, under the base
and under what the run is about. 0: every digit is the same. Runs that are published from several seeds of one commit
stand once; timings have no losses.

| run | published at | losses | base | run itself |
| --- | --- | --- | --- | --- |
"""
# of a published command: what makes the run longer, where it goes, and what was said in other words
LEFT_OUT = (
    *("scale=", "assets=", "logger.", "arm=", "seed=", "overwrite=", "runs_dir=", "cache_dir="),
    *("regime.steps=", "regime.warmup_steps=", "eval.suite_limit=", "eval.tasks="),
)
SHORT = ("scale=quick", "assets=embedded", "logger.wandb=disabled")


@dataclass(frozen=True)
class Published:
    """One arm of one commit, `place` being its folder below the records."""

    place: str
    commit: str
    overrides: tuple[str, ...]


def published(records: Path) -> list[Published]:
    """What has losses, each arm of a commit once."""
    found: dict[tuple[str, ...], Published] = {}
    for path in sorted(records.glob("*/*/*/record.json")):
        if not (path.parent / LOSSES).exists():
            continue
        record, place = Record.load(path), path.parent.relative_to(records)
        name, commit = record.config.get("variant") or record.config.get("arm"), record.commit or "unknown"
        said = [part for part in shlex.split(record.command)[3:] if not part.startswith(LEFT_OUT)]
        given = [re.sub(r"(?<=^bench.prefill_lengths=).*", "[1024]", part) for part in said]
        arm = [f"arm={name}"] if name else []
        # with two encoders earlier versions took the sparse path always, later ones where it is measured to pay
        backend = ["attention.backend=cpu-flash"] if record.config["attention"]["method"] == "focus_dual" else []
        found.setdefault((commit, *given, *arm), Published(place.as_posix(), commit, (*given, *arm, *backend)))
    return list(found.values())


class ShortRuns:
    """Runs by several commits below `work`, each made once."""

    def __init__(self, work: Path, root: Path) -> None:
        self.work, self.root = work.resolve(), root
        self.trees, self.kept = self.work / "trees", self.work / "made.json"
        self.trees.mkdir(parents=True, exist_ok=True)
        self.made: dict[str, str] = json.loads(self.kept.read_text()) if self.kept.exists() else {}

    def folder(self, commit: str, overrides: tuple[str, ...], place: str) -> Path:
        """The folder of the run, which is published at `place`; RuntimeError with what it said where there is none."""
        key = f"{commit} {shlex.join(overrides)}"
        if key not in self.made:
            self.made[key] = self._run(commit, overrides, place)
            self.kept.write_text(json.dumps(self.made, indent=1))
        if not self.made[key].startswith(str(self.work)):
            raise RuntimeError(self.made[key])
        return Path(self.made[key])

    def _run(self, commit: str, overrides: tuple[str, ...], place: str) -> str:
        tree = self.trees / commit
        if not tree.exists():
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], check=True, cwd=self.root)
        path = tuple(part for part in overrides if part.startswith("attention.backend="))
        given = [self._with_adapter(part, tree, path) for part in overrides]
        done = subprocess.run(
            [sys.executable, "-m", "focus_exp", *given, *SHORT, f"cache_dir={self.work / 'cache' / commit}"],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
        folders = re.findall(r"^run folder: (.*)$", done.stdout, flags=re.MULTILINE)
        if "finished already" in done.stdout:  # as what another arm starts from
            folders = [*tree.glob(f"runs/{place.rpartition('/')[0]}/*")]
        if folders:
            return str(tree / folders[-1])
        return f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"

    def _with_adapter(self, override: str, tree: Path, path: tuple[str, ...]) -> str:
        """In place of the run folder that is named the published adapter, else that of the same arm's short run."""
        below = re.search(r"runs/(?:records/)?([^'\"]*/adapter)", override)
        if below is None:
            return override
        experiment, arm, _ = below[1].split("/", 2)
        for top in (tree, self.root):
            if (published := top / "runs" / "records" / below[1]).exists():
                return override.replace(below[0], str(published))
        made = self.folder(tree.name, (f"+experiment={experiment}", f"arm={arm}", *path), below[1].rpartition("/")[0])
        return override.replace(below[0], str(made / "adapter"))


def line(run: Published, today: str, short: ShortRuns) -> str:
    said = f"| {run.place} | {run.commit[:7]} |"
    try:
        old, new = (short.folder(commit, run.overrides, run.place) for commit in (run.commit, today))
    except RuntimeError as error:
        return f"{said} - | - | {' '.join(str(error).split())} |\n"
    base = Record.load(new / "record.json").base
    largest, own, _, count = differences(old / LOSSES, new / LOSSES, base.name if base else "")
    return f"{said} {count} | {largest:.1g} | {own:.1g} |\n" if count else f"{said} 0 | - | - |\n"


def in_all(lines: list[str]) -> str:
    """A sentence under the table."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    commits, same = {commit for _, commit, *_ in cells}, sum(base == own == "0" for *_, base, own in cells)
    return f"\nIn all {len(cells)} arms, by {len(commits)} commits; {same} with the same losses to the last digit.\n"


def main(path: str, records: str, work: str, commit: str = "HEAD") -> None:
    named = ["git", "rev-parse", f"{commit}^{{commit}}"]
    today = subprocess.run(named, check=True, capture_output=True, text=True).stdout.strip()
    short, lines = ShortRuns(Path(work), Path.cwd()), []
    runs = published(Path(records))
    for run in runs:
        lines.append(line(run, today, short))
        print(f"{len(lines)} of {len(runs)}: {lines[-1]}", end="", flush=True)
    Path(path).write_text(HEAD.format(commit=today[:7]) + "".join(lines) + in_all(lines), encoding="utf-8")
    for tree in short.trees.iterdir():
        subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
