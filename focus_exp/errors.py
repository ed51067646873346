"""Errors that end a run: bad input and signals."""

import signal

# each ends a run at the next place from which it can resume; SLURM sends USR2 before it takes the machine away
# and XCPU where the limit of CPU time is reached
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGXCPU)

# optional module -> the extra of pyproject.toml that installs it
EXTRAS = {"lm_eval": "evaluation", "sklearn": "evaluation", "textblob": "evaluation"}


class UserError(Exception):
    """Bad input; the command line prints the message and exits with 2."""


class LeftOut(UserError):
    """A task asks for what the model or its method cannot do; it is left out."""


class TooLong(LeftOut):
    """An input has more tokens than the model has positions."""


class Interrupted(BaseException):
    """A signal asked the run to stop; the same command resumes it.

    Not an Exception, and not KeyboardInterrupt, which Lightning turns into exit code 1.
    """

    def __init__(self, signum: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}")
        self.signum = signum


class JobFailed(Exception):
    """A job of a sweep failed, and its message was printed; the other jobs run."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def not_installed(module: str) -> str:
    """Return the message that a module of EXTRAS is missing."""
    extra = EXTRAS[module]
    return f"{module} must be installed. Run make install-{extra}, or pip install 'focus_exp[{extra}]'."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or ["no reason given"])[0]
