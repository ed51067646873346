"""python -m focus_exp: compose the configuration, run the job it names; 0 done, 2 bad input, 128 + n signal n."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from focus_exp.attention.options import instead
from focus_exp.checks import no_such_key, parse
from focus_exp.config import Config, register_schemas
from focus_exp.errors import EXTRAS, STOP_SIGNALS, Interrupted, UserError, first_line, not_installed
from focus_exp.help import asked, text
from focus_exp.sweeps.frozen import FrozenJob

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# the last two: a file stands where a folder is to be made
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)

# lines of hydra's messages that help nobody, or mislead
NOISE = ("To append to your config", "reference_type=", "object_type=", "Config search path", "provider=", "See https")


def conf_dir() -> str:
    """The folder conf/: beside the package in a source tree, inside it when installed."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "conf", here / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError("conf/ is neither beside the package nor in it; install focus_exp again")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and why where that is not 0."""

    code: int = 0
    reason: str = ""


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
def run_job(composed: DictConfig) -> None:
    """Run the job that the composed configuration names; SystemExit with its code if it fails."""
    job = FrozenJob.here()
    ended = run_frozen(job) if job else guarded(lambda: execute(parse(composed)))
    if ended.code:
        raise SystemExit(ended.code)


def run_frozen(job: FrozenJob) -> Ended:
    """The same for a job of a sweep, with the configuration that was submitted; its end is noted."""
    with job.alive():
        try:
            ended = guarded(lambda: execute(job.start()))
        except Exception as error:
            job.end(1, f"{type(error).__name__}: {first_line(error)}")
            raise
        job.end(ended.code, ended.reason)
        return ended


def execute(config: Config) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # imported here, so that --help and bad configurations do not wait for torch
    importlib.import_module(f"focus_exp.jobs.{config.job}").__dict__[config.job](config)


def main() -> int:
    """Compose, run, and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of to hydra's own printer
    register_schemas()
    sys.path.append(str(Path(__file__).parent / "plugins"))
    if asked(sys.argv[1:]):
        return guarded(lambda: print(text(sys.argv[1:], Path(conf_dir())), end="")).code
    sys.argv[1:] = map(escaped, sys.argv[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with the progress bars, also in a log file
    for signum in STOP_SIGNALS:
        signal.signal(signum, interrupt)
    return guarded(run_job).code


def escaped(argument: str) -> str:
    """key=value as hydra wants it: names of run folders have an equals sign in them."""
    key, _, value = argument.partition("=")
    plain = not key.startswith("-") and not set(value) & set("\\'\"()[]{}")
    return key + "=" + value.replace("=", "\\=") if plain and "=" in value else argument


def guarded(work: Callable[[], None]) -> Ended:
    """How `work` ended: what a user can put right is one message and code 2, anything else raises."""
    try:
        work()
    except UserError as error:
        return complain(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return complain(explain(error))
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
    except OSError as error:
        if error.errno not in FULL_DISK + READ_ONLY:
            raise
        elsewhere = "choose a folder you may write to with runs_dir= or cache_dir="
        fix = "free some space" if error.errno in FULL_DISK else elsewhere
        return complain(
            f"cannot write {error.filename or 'to disk'}: {error.strerror}; {fix}, the same command goes on"
        )
    return Ended()


def interrupt(signum: int, frame: Any) -> None:
    raise Interrupted(signum, "before or after training")


def complain(message: str) -> Ended:
    print(f"error: {message}", file=sys.stderr)
    return Ended(2, message)


def explain(error: Exception) -> str:
    """Hydra's message, its cause, and the nearest name that does exist."""
    lines = [line.strip() for part in (error, error.__cause__) if part for line in str(part).splitlines()]
    message = "\n  ".join(dict.fromkeys(line for line in lines if line and not line.startswith(NOISE)))
    cause = error.__cause__ or error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and is_dataclass(cause.object_type):
        return no_such_key(str(cause.full_key), cause.object_type)
    if "launcher/submitit_slurm" in message:
        return "hydra/launcher=slurm needs the package hydra-submitit-launcher: pip install 'focus_exp[slurm]'"
    if found := re.search(r"Could not find '([\w/]+)/([\w.]+)'\s+Available options in .*", message):
        return f"there is no {found[1]}/{found[2]}{instead(found[2], message[found.end() :].split())}"
    return message


if __name__ == "__main__":
    sys.exit(main())
