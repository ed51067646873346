"""Run what experiments and pages name, as budget=paper composes it, against the local Hub of tests/hub.

    python tests/rehearse.py FOLDER [name ...]    in a folder that holds no runs yet; only the rows whose names match

A row is a command of a user. It fails if its exit code is not 0, or if its table has unfilled rows: variants that did
not finish, tasks, texts or lengths without a number. Commands run in forks of this process, which has imported all that
they import, JOBS at a time; their output is in FOLDER/logs.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parent.parent
BUDGET = "budget=rehearsal"
RUN = "python -m focus_exp"
SHORT = "short"  # in place of names: the rows of `make test`
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAIN = "README: make retrofit"
PAGES = "pages"  # pages' commands run where no others do: some are those of an experiment
PYTHON_PAGES = ("README", "own_model")
# of a page's commands, which are no rows, and why
SKIPPED = {
    "make test": "runs all tests, a short rehearsal among them",
    "make rehearse": "is what runs this",
    "make install*": "installs",
    "make lint*": "reads the code, runs none of it",
    "make slurm*": "needs SLURM, and has tests of its own",
    "make gpu*": "needs a GPU",
}
# what a page leaves to its reader
CHOICES = {
    "owner/name@revision": "HuggingFaceTB/SmolLM2-135M-Instruct@main", " hydra/launcher=slurm": "",
    " hydra.launcher.partition=gpu hydra.launcher.account=lab hydra.launcher.mem_gb=64": "",
    "-per-node=8": "-per-node=2", "trainer.devices=8": "trainer.devices=2",
    "trainer.strategy=fsdp trainer.accumulate=8": "trainer.strategy=fsdp trainer.accumulate=2",
}  # fmt: skip
# clock of each list of lengths in bench.*
CLOCKS = {
    "lengths": "attention", "prefill_lengths": "prefill", "step_lengths": "attention step",
    "decode_lengths": "decode model",
}  # fmt: skip
# the longest first
LONG = ["frontier", "compare", "seeds", "ablation", "stability", "domains", "model_scale", "transfer", "recall"]


@dataclass
class Row:
    """A command, the rows whose runs it names as {row}, and what came of it."""

    name: str
    command: str
    place: str = "."  # below FOLDER, where it runs
    code: int | None = None
    filled: str = "-"
    missing: list[str] = field(default_factory=list)
    error: str = ""
    minutes: float = 0.0
    folder: str = ""  # of its run

    @property
    def after(self) -> list[str]:
        return re.findall(r"\{([^{}]+)\}", self.command)

    @property
    def failed(self) -> bool:
        return bool(self.code or self.missing)


def experiment_rows() -> Iterator[Row]:
    names = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
    for name in sorted(names, key=lambda name: LONG.index(name) if name in LONG else len(LONG)):
        yield Row(name, f"{RUN} +experiment={name} {BUDGET}")
    yield Row("lora_124m, rank 16", f"{RUN} +experiment=lora_124m recipe.lora.rank=16 {BUDGET}")  # T3 has both


def suite_rows() -> Iterator[Row]:
    """Every suite of conf/eval, on a model with positions for most of their tasks."""
    yield Row("router", f"{RUN} +experiment=retrofit_124m model=llama2_13b +variant=retrofit_124m/focus {BUDGET}")
    for path in sorted((ROOT / "conf" / "eval").glob("*.yaml")):
        if path.stem != "base":
            adapter, few = "adapter={router}/adapter", "eval.max_sequences=2 eval.limit=2 eval.long_range_limit=2"
            yield Row(
                f"eval={path.stem}", f"{RUN} job=evaluate model=llama2_13b {adapter} eval={path.stem} {few} {BUDGET}"
            )


def page_rows() -> Iterator[Row]:
    """The commands of README and docs: as they are written, but for the budget where they are not the main job."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for language, block in BLOCKS.findall(page.read_text(encoding="utf-8")):
            if language == "python" and page.stem in PYTHON_PAGES:
                yield Row(f"{page.stem}: Python", f"python {page.stem}.py", PAGES)
            for line in block.splitlines() if language == "bash" else []:
                command = line.partition(" #")[0].strip()
                row = Row(f"{page.stem}: {command.replace(RUN, '').strip()}", command, PAGES)
                if command.startswith("make "):
                    plan = ["make", "-n", *shlex.split(command)[1:]]
                    # without ARGS of the make that started this
                    env = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS")}
                    shown = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, env=env).stdout
                    runs = re.findall(r"-m (focus_exp .*)", shown)
                    row.command = f"python -m {runs[0].strip()}" if runs else command
                elif "+experiment=" in command:
                    row.command += f" {BUDGET}"
                for written, chosen in CHOICES.items():
                    row.command = row.command.replace(written, chosen)
                row.command = row.command.replace("<run folder>", f"{{{MAIN}}}")
                row.command = row.command.replace("=runs/records/", f"={ROOT}/runs/records/")
                yield row


def last_rows(names: list[str]) -> Iterator[Row]:
    """What takes the runs of the others."""
    after = "".join(f"{{{name}}}" for name in names)
    yield Row("reproduce", f"{RUN} job=reproduce {BUDGET} #{after}")
    yield Row("report", f"{RUN} job=report #{after}{{reproduce}}")
    yield Row("dashboard", f"{RUN} job=dashboard logger.wandb=offline #{{report}}")


def short_rows() -> Iterator[Row]:
    """What `make test` runs: a part of each way to a table."""
    adapter = "adapter={retrofit_124m}/adapter"
    for name, arguments in {
        "retrofit_124m": "+experiment=retrofit_124m +variant=retrofit_124m/focus",
        "speed": "+experiment=speed bench.lengths=[1024]",
        "decode": "+experiment=decode bench.lengths=[1024]",
        "speed_quality": "+experiment=speed_quality bench.lengths=[1024]",
        "frontier": "+experiment=frontier variants=[dual_20]",
        "long_context": "+experiment=long_context variants=[paper_k_2]",
        "model_scale": "+experiment=model_scale variants=[mistral_7b,gpt2_774m_paper] eval.limit=1",
        "evaluate": f"job=evaluate {adapter} eval.tasks=[perplexity@512,perplexity@4096] eval.max_sequences=2",
    }.items():
        yield Row(name, f"{RUN} {arguments} {BUDGET}")
    yield Row("report", f"{RUN} job=report #{{speed_quality}}")


def all_rows() -> list[Row]:
    rows: dict[str, Row] = {}
    for row in (*experiment_rows(), *suite_rows(), *page_rows()):
        rows.setdefault(row.command, row)
    return [*rows.values(), *last_rows([row.name for row in rows.values()])]


def choose(rows: list[Row], patterns: list[str]) -> list[Row]:
    """Return the rows that match, after those whose runs they name."""
    by_name = {row.name: row for row in rows}
    chosen = [row for row in rows if not patterns or any(fnmatch(row.name, pattern) for pattern in patterns)]
    for row in chosen:
        needed = row.command.partition("#")[0]
        chosen += [by_name[name] for name in Row("", needed).after if by_name[name] not in chosen]
    return [row for row in rows if row in chosen]


def prepare(folder: Path, root: Path) -> None:
    """Write what the pages' commands name into the folder where they run; `root` is that of the hub."""
    from hub.texts import Writer, book

    from focus_exp.assets import cache_root

    shared = cache_root()
    os.environ["FOCUS_EXP_CACHE"] = str(folder / "cache")  # its fits and scores are made anew
    for place in ("packages", "kernels"):
        (shared / place).mkdir(parents=True, exist_ok=True)
        link(folder / "cache" / place, shared / place)
    pages = folder / PAGES
    for place in ("my/model", "path/to/model"):
        link(pages / place, root / "models" / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    writer = Writer(1)
    for number in range(8):
        write(pages / "texts" / f"{number}.txt", book(writer)[0]["text"])
    for language, block in BLOCKS.findall((ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")):
        if language != "bash":
            write(pages / block.split()[1], block)  # its first line names it
    for page in PYTHON_PAGES:
        place = ROOT / "README.md" if page == "README" else ROOT / "docs" / f"{page}.md"
        code = [block for language, block in BLOCKS.findall(place.read_text(encoding="utf-8")) if language == "python"]
        write(pages / f"{page}.py", "\n".join(code))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target, target_is_directory=True)


def execute(row: Row, command: str, folder: Path, log: Path) -> None:
    """Run a row's command in this fork, in its folder, and end with its exit code."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder / row.place)
    if command.startswith(f"{RUN} "):
        subprocess.run = fork_focus_exp(subprocess.run)
        run_focus_exp(shlex.split(command)[3:])
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = command.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT}")
    os._exit(subprocess.run(["bash", "-c", command], env=os.environ | paths).returncode)


def run_focus_exp(arguments: list[str]) -> NoReturn:
    """Do what `python -m focus_exp` does with these arguments, in this process."""
    from hydra.core.global_hydra import GlobalHydra

    from focus_exp.__main__ import main

    GlobalHydra.instance().clear()  # of the command that started this one
    sys.argv = ["focus_exp", *arguments]
    code = 1
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def fork_focus_exp(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap subprocess.run: commands of focus_exp that a command starts are forks, too."""

    def started(command: list[str], **options: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "focus_exp"]:
            return start(command, **options)
        sys.stdout.flush()
        process = FORK.Process(target=run_focus_exp, args=(command[3:],))
        process.start()
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode)

    return started


def read_outcome(row: Row, folder: Path, log: str) -> None:
    """Read from a row's log and records how much of its table is filled."""
    from focus_exp.results.record import RECORD, Record

    if row.name == "report":
        outcome = read_report(folder / "runs" / "report")
    elif row.name == "reproduce":
        outcome = {name: state == "done" for name, state in re.findall(r"^\[\d+/\d+\] (\w+): (done|failed)", log, re.M)}
    else:
        folders = [folder / row.place / run for run in dict.fromkeys(re.findall(r"^run folder: (.*)$", log, re.M))]
        with_adapter = [run for run in folders if (run / "adapter").is_dir()]  # of a comparison its last variant's
        row.folder = str((with_adapter or folders or [""])[-1])
        records = [Record.load(run / RECORD) for run in folders if (run / RECORD).exists()]
        outcome = {key: value for record in records for key, value in read_record(record).items()}
    row.missing = [name for name, is_filled in outcome.items() if not is_filled]
    errors = re.findall(r"^(?:error: |\w*(?:Error|Exception): ).*$", log, re.M) if row.code else []
    row.error = (errors or [""])[-1][:200]
    row.filled = f"{len(outcome) - len(row.missing)}/{len(outcome)}" if outcome else "-"


def read_record(record: Any) -> dict[str, bool]:
    """Return what a run was asked for, and whether it has the numbers."""
    if record.variants:
        return {variant.name: variant.status == "finished" for variant in record.variants}
    name = record.config.get("variant") or record.experiment
    outcome = {name: record.status == "finished" and bool(record.measurements)}
    for m in record.measurements:
        error = m.settings.get("error")
        if error and not m.settings.get("left_out"):  # beyond the model's positions
            outcome[f"{name} {m.metric} {m.settings.get('clock', '')} ({error[:120]})"] = False
    if record.config["job"] == "bench":
        clocks = {m.settings.get("clock") for m in record.measurements}
        outcome |= {f"{name} {key}": clock in clocks for key, clock in CLOCKS.items() if record.config["bench"][key]}
    return outcome


def read_report(folder: Path) -> dict[str, bool]:
    """Return the rows of the paper's tables, and whether any number of ours is in them.

    Lengths of T6 that budget=rehearsal leaves out are not asked for: a CPU would take hours for a million tokens.
    """
    import pandas as pd
    from omegaconf import OmegaConf

    longest = max(OmegaConf.load(ROOT / "conf" / "budget" / "rehearsal.yaml").lengths)
    outcome = {}
    for path in sorted(folder.glob("paper_*.csv")):
        frame = pd.read_csv(path)
        ours = [c for c in frame if c.startswith("ours_") and not re.search("_(low|high|seeds|mask_active)$", c)]
        variants = frame.get("variant", frame.iloc[:, 0]).fillna("")
        for key, variant, filled in zip(frame.iloc[:, 0], variants, frame[ours].notna().any(axis=1), strict=True):
            is_asked = "not in the paper" not in str(key) and not ("table6" in path.stem and key > longest)
            outcome |= {f"{path.stem.removeprefix('paper_')} {key} {variant}": bool(filled)} if is_asked else {}
    return outcome


def rehearse(rows: list[Row], folder: Path, jobs: int) -> None:
    """Run the rows, `jobs` at a time, each after those it names."""
    running: dict[BaseProcess, tuple[Row, float, Path]] = {}
    waiting, done = list(rows), dict[str, Row]()
    names, used = {row.name for row in rows}, os.times()
    while waiting or running:
        ready = [row for row in waiting if all(name in done for name in row.after if name in names)]
        for row in ready[: jobs - len(running)]:
            waiting.remove(row)
            log = folder / "logs" / (re.sub(r"[^\w.+=-]+", "_", row.name)[:80] + ".log")
            command = re.sub(r"\{([^{}]+)\}", lambda match: done[match[1]].folder, row.command.partition("#")[0])
            process = FORK.Process(target=execute, args=(row, command, folder, log))
            process.start()
            running[process] = row, time.monotonic(), log
        finished = wait([process.sentinel for process in running])
        for process in [process for process in running if process.sentinel in finished]:
            process.join()
            row, began, log = running.pop(process)
            row.code, row.minutes = process.exitcode, (time.monotonic() - began) / 60
            used, before = os.times(), used
            cpu = used.children_user + used.children_system - before.children_user - before.children_system
            read_outcome(row, folder, log.read_text(encoding="utf-8", errors="replace"))
            done[row.name] = row
            state = "FAILED" if row.failed else "ok"
            print(f"[{len(done)}/{len(rows)}] {cpu:5.0f} s CPU {row.filled:>8} {state:<6} {row.name}", flush=True)


def format_table(rows: list[Row]) -> str:
    lines = ["| command | exit code | rows filled | minutes | |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        command = re.sub(r"\{[^{}]+\}", "<run folder>", row.command.partition("#")[0].strip())
        reasons = "; ".join([row.error] * bool(row.error) + row.missing[:9])
        lines.append(f"| `{command}` | {row.code} | {row.filled} | {row.minutes:.1f} | {reasons} |")
    return "\n".join(lines) + "\n"


def import_all() -> None:
    """Import what commands import, and read lm-eval's descriptions of its tasks."""
    from focus_exp.config import JOBS
    from focus_exp.evaluation.lm_eval_harness import official_tasks

    for name in set(JOBS.values()):
        importlib.import_module(f"focus_exp.jobs.{name}")
    official_tasks()


def main(folder: Path, patterns: list[str]) -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("WANDB_MODE", "offline")
    import hub

    rows = [*short_rows()] if patterns == [SHORT] else choose(all_rows(), patterns)
    skipped = {row.name: why for row in rows for name, why in SKIPPED.items() if fnmatch(row.name, f"*: {name}")}
    rows = [row for row in rows if row.name not in skipped]
    began = time.monotonic()
    (folder / "logs").mkdir(parents=True)
    cache = Path(os.environ.get("FOCUS_EXP_CACHE") or Path.home() / ".cache" / "focus_exp")
    with hub.serve(cache, books=patterns != [SHORT]) as root:
        prepare(folder, root)
        import_all()
        rehearse(rows, folder, int(os.environ.get("JOBS", "2")))
    if patterns:  # tables that the other rows fill
        rows[-1].missing *= rows[-1].name != "report"
    failed, used, minutes = sum(row.failed for row in rows), os.times(), (time.monotonic() - began) / 60
    cpu = (used.user + used.system + used.children_user + used.children_system) / 60
    table = (
        f"{format_table(rows)}\n{len(rows)} rows, {failed} failed; {minutes:.1f} minutes, {cpu:.1f} of one core.\n\n"
    )
    table += "".join(f"Not run: {name}, which {why}.\n" for name, why in skipped.items())
    write(folder / "rehearsal.md", table)
    write(folder / "rehearsal.json", json.dumps([vars(row) for row in rows], indent=1))
    print(f"\n{table}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
