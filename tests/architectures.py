"""Check the contract of `attach` on every causal language model of transformers, tiny and random.

    python tests/architectures.py [names...]

writes the table runs/records/architectures.md when asked for all; exits 1 where an architecture is wrong or crashes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from attach_contract import FAILURES, Row, examine
from tiny_architectures import names

TABLE = Path(__file__).parent.parent / "runs" / "records" / "architectures.md"
WORKERS, TIMEOUT = 2, 120


def write(rows: list[Row], path: Path = TABLE) -> None:
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in sorted({row.outcome for row in rows})}
    lines = [
        "# Architectures",
        "",
        f"Focus on every causal language model that transformers {transformers.__version__} maps (torch "
        f"{torch.__version__}, CPU, float32), tiny and with random weights: `make architectures`.",
        "",
        f"Of {len(rows)}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".",
        "",
        "exact: with every pair kept the base model's logits to 1e-5 of the largest, masked, sparse and by the cache, "
        "and its text in `generate()`; with hard groups all paths the same; off and detached the base bit for bit; "
        "with no mask, a mask of ones, padding on the left and on the right. partly: so, but some uses are refused. "
        "refused: `attach` says why. unbuilt: no tiny model that runs could be made.",
        "",
        "| architecture | class | outcome | layers attached | largest error | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.name):
        why = "; ".join(row.why[:3]).replace("|", "\\|").replace("\n", " ")[:400]
        attached, error = f"{row.attached} of {row.layers}", f"{row.error:.0e}" if row.error else ""
        lines.append(f"| {row.name} | {row.kind} | {row.outcome} | {attached} | {error} | {why} |")
    draft = path.with_suffix(".tmp")
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draft.replace(path)


def main(wanted: list[str]) -> int:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    # a process for each architecture, so that none can take others with it
    with multiprocessing.get_context("fork").Pool(WORKERS, maxtasksperchild=1) as pool:
        for name, task in [(name, pool.apply_async(examine, (name,))) for name in wanted or names()]:
            try:
                row = task.get(TIMEOUT)
            except multiprocessing.TimeoutError:
                row = Row(name, "crash", why=[f"over {TIMEOUT} s, or its process died"])
            print(f"{name}: {row.outcome}", *row.why[:1], flush=True)
            rows.append(row)
    if not wanted:
        write(rows)
    failed = [row for row in rows if row.outcome in FAILURES]
    for row in failed:
        print(f"\n{row.name} {row.kind}: {row.outcome}", *row.why, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
