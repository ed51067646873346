"""python -m focus_exp: compose the configuration and run its job; 0 done, 2 bad input, 128 + n signal n."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from focus_exp.budget import resolve_budget
from focus_exp.checks import parse, refuse_unused
from focus_exp.cli import explain_error, order_arguments, pop_option
from focus_exp.config import JOBS, Config, conf_dir, register_schemas
from focus_exp.errors import EXTRAS, Interrupted, JobFailed, UserError, first_line, not_installed
from focus_exp.jobs.show import show
from focus_exp.launcher import check_launcher, quiet_unless_main, requeue_if_stopped, stoppable

LIMITS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE)  # of disks and of `ulimit`
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # of the GPU, of the machine


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
def run_job(composed: DictConfig) -> None:
    """Run the job that the composed configuration names.

    Raises:
        SystemExit: with the exit code, if it fails or is interrupted.
        JobFailed: if it is a job of a sweep and fails.
    """
    with stoppable(), quiet_unless_main():
        code = catch_errors(lambda: execute(parse_command(composed)))
    requeue_if_stopped(code)
    end_job(code)


def parse_command(composed: DictConfig) -> Config:
    """Return the configuration of the running command; UserError if it is invalid."""
    config = parse(composed)
    refuse_unused(config, HydraConfig.get().overrides.task)
    return config


def end_job(code: int) -> None:
    if code and HydraConfig.get().mode is RunMode.MULTIRUN and code <= 128:
        raise JobFailed(code)
    if code:
        raise SystemExit(code)


def execute(config: Config) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # imported here, so that --help and bad configurations do not wait for torch
    getattr(importlib.import_module(f"focus_exp.jobs.{JOBS[config.job]}"), config.job)(config)


def main() -> int:
    """Run the command line and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("focus_exp").setLevel(logging.INFO)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of to Hydra's printer
    register_schemas(names_only=sys.argv[1:] in ([], ["--help"]))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with the progress bars, also in a log file
    with stoppable():
        return catch_errors(run_command)


def run_command() -> None:
    arguments = order_arguments(sys.argv[1:] or ["--help"])
    check_launcher()
    is_sweep = bool({"-m", "--multirun"} & set(arguments))
    launcher = next((argument for argument in arguments if argument.startswith("hydra/launcher=")), None)
    shown = {name.partition("=")[0] for name in arguments} & {"-c", "--cfg"}
    if launcher and not is_sweep and not shown:
        raise UserError(f"{launcher} must be typed with -m, also for one job.")
    arguments = resolve_budget(arguments)
    if shown and (is_sweep or {"job", "--cfg=job", "-c=job"} & set(arguments)):
        show_jobs(arguments)
        return
    sys.argv[1:] = arguments
    try:
        run_job()
    except RuntimeError as error:  # base class of submitit's errors
        if launcher != "hydra/launcher=slurm":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(
            f"{launcher}: {reason} Check hydra.launcher.partition, hydra.launcher.account and the logs below "
            "<runs_dir>/.sweeps, or leave it out to run here."
        ) from error


def show_jobs(arguments: list[str]) -> None:
    """Print what the jobs of a command run; the launcher and its settings do not change that."""
    if (kind := pop_option(arguments, "-c", "--cfg")) != "job":
        raise UserError(f"--cfg must be job with -m (got {kind}). Leave out -m for the settings of Hydra.")
    package = pop_option(arguments, "-p", "--package")

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def show_job(composed: DictConfig) -> None:
        end_job(catch_errors(lambda: show(parse_command(composed), package)))

    kept = [a for a in arguments if not a.startswith(("hydra/launcher=", "hydra.launcher.")) and a != "--resolve"]
    with tempfile.TemporaryDirectory() as folder:  # in which Hydra describes a sweep
        sys.argv[1:] = [*kept, f"hydra.sweep.dir={folder}"]
        show_job()


def catch_errors(work: Callable[[], None]) -> int:
    """Run `work`, print an error of the user or of the system as one message, and return the exit code.

    Errors of the program are raised.
    """
    try:
        work()
    except (UserError, YAMLError) as error:  # YAMLError: of a file in --config-dir; it has file, line and column
        return fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return fail(explain_error(error))
    except JobFailed as failure:
        print("error: a job of the sweep failed, for the reason above or in <runs_dir>/.sweeps", file=sys.stderr)
        return failure.code
    except Interrupted as stop:
        without = " without overwrite=true" if "overwrite=true" in sys.argv else ""
        print(f"{stop}. Re-run the same command{without} to resume.", file=sys.stderr)
        return 128 + stop.signum
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return fail(not_installed(error.name))
    except BrokenPipeError:  # the reader of our output is gone: `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        return fail(
            f"out of memory ({first_line(error)}). Type trainer.batch_size=1 with a larger trainer.accumulate, "
            "trainer.gradient_checkpointing=true, or a smaller data.seq_len or eval.seq_len. job=plan estimates the "
            "memory of a command."
        )
    except OSError as error:
        if error.errno in (None, errno.ENOENT):  # of the program
            raise
        hint = (
            ". Free some space, raise the limit (ulimit -a), or choose another folder with runs_dir= or cache_dir=, "
            "then re-run to resume."
        )
        return fail(f"{error}{hint if error.errno in LIMITS else ''}")
    return 0


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
