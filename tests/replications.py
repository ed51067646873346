"""python tests/replications.py FILE RUNS RECORDS: published runs that were made again by another version of the code.

Where every window's loss is the same, the versions between the two have not changed what the record says.
"""

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from focus_exp.records.losses import LOSSES, read_losses
from focus_exp.records.record import Record

HEAD = """\
# Published runs made again

Made by `make replications`, of runs below `runs/` whose configuration is published from another commit (some tried
other learning rates beside their own): the largest difference of a window's (or an item's) loss in nats a token, under
the base and under what the run is about, and that of the latter's mean. 0: every digit is the same, so what was changed
in the code between the two commits has not changed the record. A base that differs was scored in another number format
before, for which the run was made again, or on another processor. Timings have no losses and are not among them.

| run | published at | made again at | processors | losses | base | run itself | its mean |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def replications(runs: Path, records: Path) -> Iterator[tuple[str, str]]:
    """A key and a line for every run that there is twice."""
    for path in sorted(runs.glob("*/*/*/record.json")):
        place = path.parent.relative_to(runs)
        published = records / place
        if not (published / LOSSES).exists() or not (path.parent / LOSSES).exists():
            continue
        old, new = Record.load(published / "record.json"), Record.load(path)
        commits = f"{(old.commit or 'unknown')[:7]} | {(new.commit or 'unknown')[:7]}"
        if new.status != "finished" or old.commit == new.commit or "dirty" in commits:
            continue
        base, own, mean, count = differences(
            published / LOSSES, path.parent / LOSSES, old.base.name if old.base else ""
        )
        key = f"| {place.as_posix()} | {commits} |"
        processors = " and ".join(dict.fromkeys(record.machine.get("cpu", "unknown") for record in (old, new)))
        yield key, f"{key} {processors} | {count} | {base:.1g} | {own:.1g} | {mean:.1g} |\n"


def differences(published: Path, again: Path, base: str) -> tuple[float, float, float, int]:
    """Largest difference of a loss under `base`, and under anything else, that of the latter's means, and how many
    losses are in both.

    What is counted in other units now is left out.
    """
    old, new = read_losses(published), read_losses(again)
    largest, mean, count = {True: 0.0, False: 0.0}, 0.0, 0
    for of in old.keys() & new.keys():
        if old[of].units != new[of].units:
            continue
        for name in old[of].nll.keys() & new[of].nll.keys():
            found = new[of].nll[name] - old[of].nll[name]
            largest[name == base] = max(largest[name == base], float(np.nanmax(np.abs(found))))
            mean = mean if name == base else max(mean, float(np.abs(np.nanmean(found))))
            count += int(np.isfinite(found).sum())
    return largest[True], largest[False], mean, count


def main(path: Path, runs: Path, records: Path) -> None:
    """What the file tells of runs that are no longer there stays in it."""
    known = path.read_text(encoding="utf-8").splitlines(keepends=True)[HEAD.count("\n") :] if path.exists() else []
    told = [line for line in known if line.startswith("| ")]
    lines = {" | ".join(line.split(" | ")[:3]) + " |": line for line in told} | dict(replications(runs, records))
    path.write_text(HEAD + "".join(lines[key] for key in sorted(lines)) + in_all(lines.values()), encoding="utf-8")


def in_all(lines: Collection[str]) -> str:
    """A sentence under the table."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    experiments = {run.partition("/")[0] for run, *_ in cells}
    same = sum(float(own) == 0 for *_, own, _ in cells)
    return (
        f"\nIn all {len(cells)} runs of {len(experiments)} experiments ({', '.join(sorted(experiments))}); "
        f"{same} of them with the same losses to the last digit.\n"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
