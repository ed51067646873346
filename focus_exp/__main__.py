"""python -m focus_exp: compose the configuration, run the job it names; 0 done, 2 bad input, 128 + n signal n."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from focus_exp.checks import parse
from focus_exp.config import Config, register_schemas
from focus_exp.errors import EXTRAS, Interrupted, JobFailed, UserError, first_line, not_installed
from focus_exp.explain import arranged, explain
from focus_exp.help import help_text, wants_help
from focus_exp.launcher import check_launcher, quiet_unless_main, requeue_if_stopped, stoppable
from focus_exp.overrides import quote_override
from focus_exp.shipped import conf_dir

# what to do about a limit of the system that a write or an open has met
LIMITS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space of your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
}
# the last two: a file stands where a folder is to be made
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # of a GPU, and of the machine


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and why where that is not 0."""

    code: int = 0
    reason: str = ""


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
def run_job(composed: DictConfig) -> None:
    """Run the job that the composed configuration names.

    Raises:
        SystemExit: with the exit code, if it fails or is interrupted.
        JobFailed: if it is a job of a sweep and fails.
    """
    with stoppable(), quiet_unless_main():
        ended = guarded(lambda: execute(validated(composed)))
    requeue_if_stopped(ended.code)
    if ended.code and HydraConfig.get().mode is RunMode.MULTIRUN and ended.code <= 128:
        raise JobFailed(ended.code, ended.reason)
    if ended.code:
        raise SystemExit(ended.code)


def validated(composed: DictConfig) -> Config:
    """Return the composed configuration as dataclasses, checked."""
    launcher = next((given for given in HydraConfig.get().overrides.hydra if given.startswith("hydra/launcher=")), None)
    if launcher and HydraConfig.get().mode is RunMode.RUN:
        raise UserError(f"{launcher} launches what -m asks for, be it one job; add -m")
    return parse(composed)


def execute(config: Config) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # imported here, so that --help and bad configurations do not wait for torch
    importlib.import_module(f"focus_exp.jobs.{config.job}").__dict__[config.job](config)


def main() -> int:
    """Compose, run, and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("focus_exp").setLevel(logging.INFO)  # what takes minutes says so
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of to hydra's own printer
    register_schemas()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with the progress bars, also in a log file
    with stoppable():
        return guarded(answer).code


def answer() -> None:
    """Say what was asked, or run the job."""
    conf = Path(conf_dir())
    arguments = arranged(sys.argv[1:], conf)
    if not arguments or wants_help(arguments):
        print(help_text(arguments, conf), end="")
        return
    multirun = bool({"-m", "--multirun"} & set(arguments))
    check_launcher()
    sys.argv[1:] = [quote_override(argument, multirun) for argument in arguments]
    try:
        run_job()
    except RuntimeError as error:  # base class of submitit's errors
        if "hydra/launcher=slurm" not in arguments:
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(
            f"hydra/launcher=slurm: {reason}. See hydra.launcher.partition, .account and the logs below "
            "<runs_dir>/.sweeps, or leave it out to run here."
        ) from error


def guarded(work: Callable[[], None]) -> Ended:
    """How `work` ended: what a user can put right is one message and code 2, anything else raises."""
    try:
        work()
    except UserError as error:
        return complain(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return complain(explain(error))
    except YAMLError as error:  # of a file that --config-dir holds; it names file, line and column
        return complain(str(error))
    except JobFailed as failure:
        print(f"error: a job of the sweep failed: {failure.reason}", file=sys.stderr)
        return Ended(failure.code, failure.reason)
    except Interrupted as stop:
        print(f"{stop}; the same command goes on from here", file=sys.stderr)
        return Ended(128 + stop.signum, str(stop))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return complain(not_installed(error.name))
    except BrokenPipeError as error:  # the reader of our output has left: `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Ended(128 + signal.SIGPIPE, str(error))
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        return complain(
            f"out of memory ({first_line(error)}); take less at a time with trainer.batch_size=1 and more "
            "trainer.accumulate, trainer.gradient_checkpointing=true, a smaller data.seq_len or eval.seq_len; "
            "job=plan with the same command says what it needs"
        )
    except OSError as error:
        if error.errno not in (*LIMITS, *READ_ONLY) and not making_a_folder(error):
            raise
        fix = LIMITS.get(error.errno or 0, "choose a folder you may write to with runs_dir= or cache_dir=")
        return complain(
            f"cannot write {error.filename or 'to disk'}: {error.strerror}; {fix}, the same command goes on"
        )
    return Ended()


def making_a_folder(error: OSError) -> bool:
    """Whether that is what failed: where none can be made the system may say that its place does not exist."""
    return traceback.extract_tb(error.__traceback__)[-1].name in ("mkdir", "makedirs")


def complain(message: str) -> Ended:
    print(f"error: {message}", file=sys.stderr)
    return Ended(2, message)


if __name__ == "__main__":
    sys.exit(main())
