"""How a run ends early: by something the user can put right, or by a signal."""

import signal

# each ends a run at the next place from which it can go on; SLURM sends USR2 before it takes the machine away
# and XCPU where the limit of CPU time is reached
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGXCPU)

# what is imported of packages that only an extra of pyproject.toml brings, and its name
EXTRAS = {"lm_eval": "evaluation", "sklearn": "evaluation", "textblob": "evaluation"}


class UserError(Exception):
    """Bad input: what is wrong, where, and what to do. The command line prints it and exits with 2."""


class Interrupted(BaseException):
    """A signal asked the run to stop; what was done is on disk and the same command goes on from there.

    Not an Exception, and not KeyboardInterrupt, which Lightning turns into exit code 1.
    """

    def __init__(self, signum: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}")
        self.signum = signum


class JobFailed(Exception):
    """A job of a sweep failed; its reason is printed already. The other jobs run."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)  # both, so that it can be pickled
        self.code, self.reason = code, reason


def not_installed(module: str) -> str:
    """That a module of EXTRAS is missing, and how it is had."""
    extra = EXTRAS[module]
    return f"this needs {module}: make install-{extra}, or pip install 'focus_exp[{extra}]'"


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return (str(error).strip().splitlines() or ["no reason given"])[0]
