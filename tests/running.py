"""Run the command line in the test's own process, on a tiny model and generated text."""

import contextlib
import errno
import io
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure

from focus_exp import __main__ as command_line
from focus_exp.attention.registry import METHODS
from focus_exp.config import AttentionConfig, find_schema
from focus_exp.errors import STOP_SIGNALS
from focus_exp.results.measurement import MEASUREMENTS, read_measurements
from focus_exp.results.metrics import read_metrics
from focus_exp.results.record import Record

TIMES = ("seconds", "tokens_per_second")
# a short fit of two encoders
DUAL = [
    *("attention=focus_dual", "recipe=none", "attention.groups=4", "recipe.fit.steps=4"),
    *("recipe.fit.sequences=2", "recipe.fit.validation_sequences=1"),
]


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def run(*arguments: str, apart: bool = False) -> Result:
    """Run `python -m focus_exp *arguments`; unhandled exceptions are raised.

    Args:
        apart: run commands that this one starts as processes, and not in this one.
    """
    out, err = io.StringIO(), io.StringIO()
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(sys, "argv", ["focus_exp", *arguments])
            patch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # it composes all to learn that none is set
            patch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"not drawn"))  # it takes longest
            if not apart:
                patch.setattr(subprocess, "run", waited_for(subprocess.run))
            code = command_line.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    return Result(code, out.getvalue(), err.getvalue())


def succeed(*arguments: str, **options: bool) -> Result:
    """Run a command that must exit with 0."""
    result = run(*arguments, **options)
    assert result.code == 0, result.err
    return result


def waited_for(start: Callable[..., subprocess.CompletedProcess]) -> Callable[..., subprocess.CompletedProcess]:
    """Wrap `subprocess.run` to run focus_exp in this process."""

    def started(command: list[str], **options: Any) -> subprocess.CompletedProcess:
        ours = command[:3] == [sys.executable, "-m", "focus_exp"]
        return here(command) if ours else start(command, **options)

    return started


def here(command: list[str]) -> subprocess.CompletedProcess:
    """Run `python -m focus_exp ...` within another such command."""
    hydra, configuration = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    code = run(*command[3:]).code
    GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra, configuration
    return subprocess.CompletedProcess(command, code)


def fitting(*arguments: str) -> list[str]:
    """Drop the Focus options of `tiny` that the chosen attention does not have."""
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    chosen = given.get("attention", "full" if given.get("recipe") == "lora" else "focus")
    method = max((name for name in ("full", *METHODS) if chosen.startswith(name)), key=len, default="focus")
    known, all_known = ({f"attention.{item.name}" for item in fields(find_schema(m))} for m in (method, "focus"))
    return [part for part in arguments if part.partition("=")[0] not in all_known - known]


def without_attention(arguments: list[str]) -> list[str]:
    """Drop the options of a method: an adapter has its own."""
    return [part for part in arguments if not part.startswith("attention.")]


def attention_of(method: str, **options: Any) -> AttentionConfig:
    """Make attention.* of a method from those `options` that it has."""
    schema = find_schema(method)
    known = {item.name for item in fields(schema)}
    return schema(name=method, method=method, **{key: value for key, value in options.items() if key in known})


def write_texts(folder: Path, words: int = 150) -> Path:
    """Write five files of `words` random words each."""
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(generator.choices(letters, k=generator.randint(2, 8))) for _ in range(50)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(5):
        (folder / f"{number}.txt").write_text(" ".join(generator.choices(vocabulary, k=words)), encoding="utf-8")
    return folder


def tiny(folder: Path, runs: str = "runs") -> list[str]:
    """Return the settings of a run that takes seconds and writes below `folder` only."""
    return [
        *("model=tiny_llama", "data=files", f"data.files={write_texts(folder / 'texts')}"),
        *(f"runs_dir={folder / runs}", f"cache_dir={folder / 'cache'}", "logger.wandb=disabled"),
        *("data.seq_len=32", "eval.seq_len=32", "eval.max_sequences=3"),
        *("bench.lengths=[48]", "bench.prefill_lengths=[64]", "bench.step_lengths=[64]", "bench.decode_lengths=[40]"),
        *("bench.repeats=1", "bench.routed_tokens=64", "bench.groups=[2]", "bench.top_k=[1,2]"),
        *("attention.window=8", "attention.sinks=1", "attention.groups=2"),
        *("generate.prompts=2", "generate.prompt_tokens=20", "generate.new_tokens=12"),
        *("analyze.tokens=96", "analyze.passage_tokens=24", "analyze.pairs=4"),
        *("budget.warm_start_sequences=1", "budget.warm_start_steps=3", "budget.balance_sequences=1"),
        *("trainer.batch_size=2", "trainer.accumulate=2", "trainer.progress=false"),
        *("trainer.accelerator=cpu", "trainer.precision=float32", "shared_variant=null"),
    ]


def full_disk_at(patch: pytest.MonkeyPatch, number: int) -> list[bytes]:
    """Let torch.save fail in the middle of checkpoint `number`; returns the complete ones before it."""
    save, whole = torch.save, []

    def full(state: Any, file: BinaryIO, **options: Any) -> None:
        if options:  # a tensor that is pickled for another process
            save(state, file, **options)
            return
        content = io.BytesIO()
        save(state, content)
        if len(whole) + 1 < number:
            whole.append(content.getvalue())
            file.write(whole[-1])
            return
        file.write(content.getvalue()[: len(content.getvalue()) // 2])
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None

    patch.setattr(torch, "save", full)
    return whole


def router_steps(steps: int) -> str:
    return f"recipe.phases.router.steps={steps}"


def only_run(folder: Path) -> Path:
    """Return the folder of the only run below `folder`."""
    (record,) = folder.rglob("record.json")
    return record.parent


def records_of(folder: Path) -> list[Record]:
    """Return the records of the runs below `folder`, in the order of their paths."""
    return [Record.load(path) for path in sorted(folder.rglob("record.json"))]


def record_of(folder: Path) -> Record:
    return Record.load(only_run(folder) / "record.json")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the training log of the only run below `folder`, without times."""
    lines = read_metrics(only_run(folder) / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def outcome(folder: Path) -> dict[str, Any]:
    """Return what the only run below `folder` computed: a function of configuration and seed."""
    record = json.loads((only_run(folder) / "record.json").read_text(encoding="utf-8"))
    measured = [m for m in read_measurements(only_run(folder) / MEASUREMENTS) if not m.metric.endswith("seconds")]
    kept = ("status", "config_hash", "model", "method", "steps", "tokens_seen")
    weights = {path.name: path.read_bytes() for path in only_run(folder).rglob("*.safetensors")}
    return {
        "metrics": metrics_of(folder),
        "weights": weights,
        "measured": measured,
        **{key: record[key] for key in kept},
    }
