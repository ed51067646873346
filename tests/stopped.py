"""python tests/stopped.py STAGE SIGNAL ARGUMENTS...: `python -m focus_exp ARGUMENTS`, which signals itself in a stage.

python tests/stopped.py BACK SECONDS ARGUMENTS...: the same with a clock that is so many seconds behind.
"""

import importlib
import os
import signal
import sys
import time
from functools import reduce
from pathlib import Path
from typing import Any

from focus_exp import __main__ as command_line

BACK = "back"
# stage -> a function and the number of its call after which the signal is sent
CALLS = {
    "the model was loaded": ("focus_exp.runs.prepare.load_model", 1),
    "the token cache is written": ("focus_exp.data.corpus.write_stream", 2),
    "the routers are warm-started": ("focus_exp.jobs.train.warm_start", 1),
    "the first phase is trained": ("focus_exp.training.module.LanguageModelTask.training_step", 3),
    "the second phase is trained": ("focus_exp.training.module.LanguageModelTask.training_step", 9),
    "the balance is calibrated": ("focus_exp.jobs.train.calibrate", 1),
    "the third row is measured": ("focus_exp.evaluation.perplexity.score", 3),
}
# stage -> the name of a file or folder that is half written, and how many of that name were renamed before
WRITES = {
    "a variant's losses are written": ("focus_soft.npz", 0),
    "a checkpoint is written": ("everything.ckpt", 1),
    "the adapter's second file is written": ("focus_adapter.safetensors", 0),
    "the trained base is written": ("model", 0),
    "the table is written": ("table.md", 0),
    "the finished record is written": ("record.json", 2),
}
STAGES = (*CALLS, *WRITES)


def signal_after_call(name: str, count: int, signum: int) -> None:
    """Patch the function of that dotted name to signal this process after its call `count`."""
    owner_name, _, attribute = name.rpartition(".")
    owner = resolve(owner_name)
    original, calls = getattr(owner, attribute), []

    def counted(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        calls.append(None)
        if len(calls) == count:
            os.kill(os.getpid(), signum)
        return result

    setattr(owner, attribute, counted)


def resolve(name: str) -> Any:
    """Import a module, or a class in it."""
    parts = name.split(".")
    depth = next(i for i, part in enumerate([*parts, "Z"]) if part[0].isupper())
    return reduce(getattr, parts[depth:], importlib.import_module(".".join(parts[:depth])))


def signal_in_rename(name: str, earlier: int, signum: int) -> None:
    """Signal this process when `name` is about to be renamed into place; SIGKILL truncates it first."""
    replace, renames = os.replace, []

    def counted(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == name:
            renames.append(None)
            if len(renames) == earlier + 1:
                if signum == signal.SIGKILL:
                    truncate(Path(source))
                os.kill(os.getpid(), signum)
        replace(source, target, **options)

    os.replace = counted


def truncate(path: Path) -> None:
    """Cut a file, or every file of a folder, in half."""
    for file in [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]:
        os.truncate(file, file.stat().st_size // 2)


def set_clock_back(seconds: float) -> None:
    now = time.time
    time.time = lambda: now() - seconds  # type: ignore[assignment]
    time.time_ns = lambda: int((now() - seconds) * 1e9)  # type: ignore[assignment]


def main() -> int:
    stage, value, *arguments = sys.argv[1:]
    if stage == BACK:
        set_clock_back(float(value))
    elif stage in CALLS:
        signal_after_call(*CALLS[stage], int(value))
    else:
        signal_in_rename(*WRITES[stage], int(value))
    sys.argv[1:] = arguments
    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
