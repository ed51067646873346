"""Name, lock and earlier record of a run directory."""

import os
import re
from pathlib import Path

from focus_exp.assets import uses_embedded
from focus_exp.config import Config, is_shipped
from focus_exp.identity import identity
from focus_exp.results.record import Record

EMBEDDED_MODEL, EMBEDDED_DATA = "smollm2_135m_q4", "books"  # names of the substitutes without the Hub


def run_folder(config: Config) -> Path:
    """Return the directory of a run, named after what it runs.

    runs/<experiment>/<model>-<data>-<device>/<method>-seed<n>-<config hash>: the model and data that are used (not
    those that they stand in for), cpu or cuda, and the variant, method or recipe.
    """
    used = f"{name_model(config)}-{name_data(config)}-{name_device(config)}"
    name = f"{name_method(config)}-seed{config.seed}-{identity(config)[:8]}"
    return Path(config.runs_dir) / name_experiment(config.experiment) / used / name


def name_experiment(experiment: str) -> str:
    """Return an experiment's name without a model size: `retrofit_124m` is `retrofit`."""
    return re.sub(r"_\d+[mb]$", "", experiment)


def name_method(config: Config) -> str:
    """Return the variant, attention or recipe, with the job unless it trains."""
    method = config.recipe.name if config.attention.method == "full" else config.attention.name
    return config.variant or (method if config.job == "train" else f"{method}-{config.job}")


def name_model(config: Config) -> str:
    """Return the name of the model that runs, which a substitute keeps."""
    model = config.model
    if config.recipe.from_scratch or model.base_run or not (model.path or model.hub_id):
        return to_slug(model.name)
    if model.path:
        return to_slug(_own_name(Path(model.path)))
    assert model.hub_id
    if uses_embedded(config.assets, "models", model.hub_id, is_shipped("model", model.hub_id)):
        return EMBEDDED_MODEL
    return to_slug(model.hub_id.rpartition("/")[2]) + ("" if model.quantization == "none" else f"_{model.quantization}")


def name_data(config: Config) -> str:
    """Return the name of the corpus that is scored, which a substitute keeps."""
    data = config.scored_data
    if data.source == "files":
        files = str(data.files)
        return to_slug(files.split(":")[1].split("/")[0] if files.startswith("package:") else _own_name(Path(files)))
    if data.source != "hub" or not data.hub_id:
        return to_slug(data.source)
    if uses_embedded(config.assets, "datasets", data.hub_id, is_shipped("data", data.hub_id)):
        return EMBEDDED_DATA
    return to_slug(data.hub_id.rpartition("/")[2])


def name_device(config: Config) -> str:
    """Return cpu or cuda."""
    if config.trainer.accelerator != "auto":
        return "cuda" if config.trainer.accelerator == "gpu" else "cpu"
    from torch.cuda import is_available  # only what names a run of its own needs torch

    return "cuda" if is_available() else "cpu"


def to_slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", name.lower()).strip("_.")[:40] or "unnamed"


def _own_name(path: Path) -> str:
    """Return the last distinctive part of a path: of <run>/model the name of the run."""
    path = Path(os.path.abspath(path.expanduser()))
    return path.parent.name if path.name in ("model", "adapter") or set(path.name) & set("*?[") else path.stem


def earlier_record(config: Config) -> Record | None:
    """Return the record in the run directory, if there is one."""
    path = run_folder(config) / "record.json"
    return Record.load(path) if path.exists() else None


def lock_path(folder: Path) -> Path:
    """Return the lock file of a run directory, which overwrite=true keeps."""
    return folder.with_name(f".{folder.name}.lock")
