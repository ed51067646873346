"""python -m focus_exp.jobs.follower: another process of a run, started by process 0, which tells it the run."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from omegaconf import OmegaConf

from focus_exp.config import Config, structured
from focus_exp.errors import Interrupted, UserError
from focus_exp.jobs.train import carry_out
from focus_exp.training.exchange import LostProcess, leave_group
from focus_exp.training.processes import follow_input


def main() -> int:
    """Take part in the run that the first line of standard input tells; exit codes as of the command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    asked, config = (configuration(values) for values in json.loads(sys.stdin.readline()))
    follow_input()
    try:
        carry_out(asked, config, [])
        leave_group()
    except LostProcess:  # which process 0 knows
        return 2
    except UserError as error:
        print(f"error in process {os.environ['RANK']}: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        return 128 + stop.signum
    return 0


def configuration(values: dict[str, Any]) -> Config:
    config = OmegaConf.to_object(structured(values))
    assert isinstance(config, Config)
    return config


if __name__ == "__main__":
    sys.exit(main())
