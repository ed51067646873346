"""python -m focus_exp.jobs.follower: another process of a run, started by process 0 with its configuration."""

from __future__ import annotations

import json
import logging
import os
import sys

from omegaconf import OmegaConf

from focus_exp.config import Config, structured
from focus_exp.errors import Interrupted, UserError
from focus_exp.jobs.train import train
from focus_exp.training.exchange import LostProcess, leave_group
from focus_exp.training.processes import follow_input


def main() -> int:
    """Take part in the run whose configuration is the first line of standard input; exit codes as of the command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = OmegaConf.to_object(structured(json.loads(sys.stdin.readline())))
    assert isinstance(config, Config)
    follow_input()
    try:
        train(config)
        leave_group()
    except LostProcess:  # which process 0 knows
        return 2
    except UserError as error:
        print(f"error in process {os.environ['RANK']}: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        return 128 + stop.signum
    return 0


if __name__ == "__main__":
    sys.exit(main())
