"""budget=auto: paper, or what fits two CPU cores, as the machine allows; chosen before all is composed."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from focus_exp.assets import uses_embedded
from focus_exp.cli import VALUED
from focus_exp.config import conf_dir, is_shipped
from focus_exp.errors import UserError
from focus_exp.launcher import count_processes

AUTO = "auto"
MAIN_JOB = "retrofit_124m"  # experiment whose first answer comes at budget=first, where others take embedded
WITHOUT_RUNS = ("report", "dashboard", "build_tasks")  # jobs that need no budget, nor wait for torch
# of the drivers of NVIDIA, its boards, AMD and WSL, without which torch has no GPU
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
CONFIG_DIR = ("--config-dir", "-cd")


def resolve_budget(arguments: list[str]) -> list[str]:
    """Return the arguments with budget=paper, embedded or first in place of budget=auto, the default.

    The budget of a sweep is that of its first job. Under SLURM's launcher the jobs have a GPU unless
    hydra.launcher.gpus_per_node says otherwise; whether the Hub answers is asked on this machine.

    Raises:
        UserError: several processes would each have to ask the Hub.
    """
    options = arguments[: count_options(arguments)]
    settings = arguments[len(options) :]
    try:
        overrides = OverridesParser.create().parse_overrides(settings)
        typed = [first_value(override) for override in overrides if override.key_or_group == "budget"]
        if typed not in ([], [f"budget={AUTO}"]) or {f"job={job}" for job in WITHOUT_RUNS} & set(settings):
            return arguments
        rest = [override for override in overrides if override.key_or_group != "budget"]
        budget, on_gpu_node = "embedded", launches_on_gpus(settings)
        if on_gpu_node or has_gpu_driver():
            firsts = [first_value(override) for override in rest if not override.key_or_group.startswith("hydra")]
            folders = [options[i + 1] for i, option in enumerate(options[:-1]) if option in CONFIG_DIR]
            with initialize_config_dir(conf_dir(), version_base="1.3"):
                paths = (f"hydra.searchpath=['file://{folder}']" for folder in folders)
                composed = compose("config", [*firsts, *paths])
            budget = choose_budget(composed, on_gpu_node=on_gpu_node)
    except (HydraException, OmegaConfBaseException):
        return arguments  # which the command will refuse
    if budget == "embedded" and trains_main_job(rest):
        budget = "first"
    return [*options, *(str(override.input_line) for override in rest), f"budget={budget}"]


def count_options(arguments: list[str]) -> int:
    """Return how many arguments, which come first, are options or their values."""
    count = 0
    while count < len(arguments) and arguments[count].startswith("-"):
        count += 2 if arguments[count] in VALUED else 1
    return count


def trains_main_job(overrides: list[Override]) -> bool:
    """Return whether the main job or a variant of it runs, alone or as the first of a sweep."""
    values = {override.key_or_group: first_value(override).partition("=")[2] for override in overrides}
    return values.get("experiment") == MAIN_JOB and values.get("job", "compare") in ("train", "compare")


def first_value(override: Override) -> str:
    """Return an override as text, of a sweep with its first value."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def launches_on_gpus(settings: list[str]) -> bool:
    """Return whether SLURM runs the jobs, on nodes with a GPU."""
    without = {f"hydra.launcher.gpus_per_node={none}" for none in ("null", "0")}
    return "hydra/launcher=slurm" in settings and not without & set(settings)


def has_gpu_driver() -> bool:
    """Return whether torch may have a GPU, without waiting for torch."""
    return sys.platform == "win32" or any(Path(device).exists() for device in GPU_DEVICES)


def choose_budget(config: DictConfig, *, on_gpu_node: bool) -> str:
    """Return paper where the Hub serves the named model and there is a GPU, else embedded.

    Weights of a local folder and random ones are not of the Hub. The Hub is asked last, and only with a GPU.
    """
    model = config.model
    if config.assets == "embedded" or model.path or not model.hub_id or config.trainer.accelerator == "cpu":
        return "embedded"
    if not on_gpu_node:
        from torch.cuda import is_available  # takes seconds

        if not is_available():
            return "embedded"
    is_replaceable = is_shipped("model", model.hub_id)
    if config.assets == "auto" and is_replaceable and count_processes() > 1:  # each would ask the Hub for itself
        raise UserError(
            f"budget must be typed for several processes (got {AUTO}). Type budget=paper, or budget=embedded."
        )
    return "embedded" if uses_embedded(config.assets, "models", model.hub_id, is_replaceable) else "paper"
