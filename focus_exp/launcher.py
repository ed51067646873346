"""The environment variables by which torchrun and srun tell a process its place among others."""

from __future__ import annotations

import os

from focus_exp.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", *SRUN[:-1])


def check_launcher() -> None:
    """Raise UserError if the variables of torchrun or srun are partial or no numbers."""
    for name in NUMBERS:
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise UserError(f"{name} must be a whole number (got {value!r}). Start with torchrun or srun, or unset it.")
    if "RANK" in os.environ:
        _require(TORCHRUN, "RANK", "torchrun")
        number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if number >= count:
            raise UserError(f"RANK must be below WORLD_SIZE={count} (got {number}). Start with torchrun.")
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _require(SRUN, "SLURM_STEP_NUM_TASKS", "srun")
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _require(TORCHRUN, "WORLD_SIZE", "torchrun")


def _require(names: tuple[str, ...], name: str, launcher: str) -> None:
    if missing := [other for other in names if other not in os.environ]:
        raise UserError(
            f"{name}={os.environ[name]} must come with {', '.join(missing)} (not set). Start with {launcher}, or unset "
            f"{name}."
        )
