"""Save and load adapters on disk and on the Hub: safetensors and JSON."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.assets import ADAPTER_FILES, find_adapter
from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.registry import build, find
from focus_exp.errors import UserError, first_line
from focus_exp.models.attach import attach, detach
from focus_exp.models.load import (
    are_casts,
    gather_tensor,
    hash_samples,
    join_samples,
    sample_parameters,
    select_numerics,
)
from focus_exp.models.methods import Attachment, attached_methods, get_attachment, is_causal, set_routing
from focus_exp.storage import atomic_write

log = logging.getLogger(__name__)
WEIGHTS, DESCRIPTION, CARD = ADAPTER_FILES
FORMAT = 1
HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]  # of the HTTP client of huggingface_hub
BASE_HINT = "give it with model.path=<its folder> or model.hub_id=<owner/name>"
SAMPLES = "base_model.samples"  # tensor of numbers of the base, which tell its casts to float16
# in names of tensors: PEFT's modules_to_save, torch.compile and activation checkpointing
WRAPPERS = re.compile(r"\b(modules_to_save\.\w+|_orig_mod|_checkpoint_wrapped_module)\.")
UNUSED_COPY = "original_module."  # from before PEFT trained
FIELDS = ("method", "options", "layers", "causal", "trainable_parameters", "base_model")


def save_adapter(
    model: PreTrainedModel, folder: str | Path, extra: dict[str, Any] | None = None, write: bool = True
) -> Path:
    """Write weights, buffers and description of the attached method, atomically.

    Args:
        extra: added to the description.
        write: False for all but one process of a sharded model; all must call this.

    Raises:
        UserError: a wrapper has changed the tensors of the method, so that they could not be loaded.
    """
    folder, attachment, samples = Path(folder), get_attachment(model), sample_parameters(model)
    methods = {index: copy_plain(index, method, attachment) for index, method in attached_methods(model).items()}
    tensors = {f"layers.{i}.{name}": x for i, method in methods.items() for name, x in method.state_dict().items()}
    tensors[SAMPLES] = join_samples(samples)
    description = {
        "format": FORMAT,
        "method": attachment.method,
        "options": attachment.options,
        "layers": attachment.layers,
        "causal": is_causal(model),
        "trainable_parameters": sum(p.numel() for method in methods.values() for p in method.parameters()),
        "base_model": {
            "name": base_name(model),
            "model_type": model.config.model_type,
            "revision": getattr(model.config, "_commit_hash", None),
            "fingerprint": hash_samples(samples),
            "arithmetic": select_numerics(model.config),
        },
        **(extra or {}),
    }
    if write:
        with atomic_write(folder / WEIGHTS) as weights, atomic_write(folder / DESCRIPTION) as text:
            save_file(tensors, weights)
            text.write_text(json.dumps(description, indent=2, default=Tensor.tolist) + "\n", encoding="utf-8")
    return folder


def copy_plain(index: int, method: AttentionMethod, attachment: Attachment) -> AttentionMethod:
    """Copy a method as an adapter builds it: on the CPU, whole, and without wrappers of its modules.

    Raises:
        UserError: it has other tensors, as with LoRA on the router; its adapter could not be loaded.
    """
    with torch.random.fork_rng(devices=[]):
        plain = build(attachment.method, method.shape, **attachment.options)
    tensors = {name: gather_tensor(tensor).cpu().contiguous() for name, tensor in method.state_dict().items()}
    state = [(WRAPPERS.sub("", name), x) for name, x in tensors.items() if UNUSED_COPY not in name]
    try:
        plain.load_state_dict(dict(state), assign=True)
        if len(dict(state)) < len(state):
            raise RuntimeError("it has several PEFT adapters")
    except RuntimeError as error:
        raise UserError(
            f"layer {index}: the attached method cannot be saved ({error}). Call merge_and_unload(), or remove other "
            "wrappers of the method, first."
        ) from None
    return plain


def base_name(model: PreTrainedModel) -> str:
    """Return the base model's name on the Hub, or the last part of its folder."""
    base = getattr(model, "get_base_model", lambda: model)()  # without PEFT's wrapper
    name: str = model.config.name_or_path or type(base).__name__.removeprefix("FSDP")
    return Path(name).name if Path(name).is_absolute() else name


def push_to_hub(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a saved adapter and its card to `repo_id`; returns its URL.

    Raises:
        UserError: there is no adapter in `folder`, or the Hub refuses or cannot be reached.
    """
    read_description(folder)
    hub = HfApi(token=token)
    try:
        hub.create_repo(repo_id, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=[*ADAPTER_FILES]))
    except (HTTP_ERROR, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{folder} was not uploaded to {repo_id} ({reason}).") from error


def read_description(folder: str | Path) -> dict[str, Any]:
    """Read the JSON of an adapter, in a folder or on the Hub.

    Raises:
        UserError: it is missing, damaged, or of another format or method.
    """
    path = find_adapter(folder) / DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (version := description["format"]) != FORMAT:
            raise UserError(f"{path}: format must be {FORMAT} (got {version}). Use a matching version of focus_exp.")
        if missing := {*FIELDS, "fingerprint"} - {*description, *description["base_model"]}:
            raise KeyError(*missing)
        method = find(description["method"], imports=False)
        unknown = sorted(description["options"].keys() - {item.name for item in fields(method.options)})
    except FileNotFoundError:
        reason = "" if Path(folder).is_dir() else ": no such folder"
        raise UserError(f"{folder} has no {DESCRIPTION}{reason}. Give a run's folder, or its adapter/.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}). Copy the adapter again.") from None
    if unknown:
        raise UserError(
            f"{path}: method {description['method']} has no options {', '.join(unknown)}. Copy the adapter again, or "
            "use the version of focus_exp that wrote it."
        )
    return description


def adapter_name(folder: str | Path) -> str:
    """Return the name of the run, or of its variant, that an adapter comes from."""
    path = Path(folder)
    return path.parent.name if path.name == "adapter" else path.name.removeprefix("adapter-")


def load_adapter(
    model: PreTrainedModel, folder: str | Path, *, hard: bool = True, check_base: bool = True
) -> PreTrainedModel:
    """Attach a saved adapter, in eval mode; `model.train()` trains it further.

    Args:
        folder: or an adapter on the Hub: owner/name, or owner/name@revision.
        hard: hard or soft routing.
        check_base: False allows other base weights than in training, as of a quantized copy; shapes must fit.

    Raises:
        UserError: the adapter belongs to another base, or its files are damaged. The model is then unchanged.
    """
    description, tensors = read_adapter(model, folder, check_base=check_base)
    try:
        attach(model, description["method"], layers=description["layers"], **description["options"])
    except UserError as error:
        raise UserError(f"the adapter in {folder} cannot be attached: {error}") from error
    try:
        load_tensors(attached_methods(model), tensors, folder)
    except UserError:
        detach(model)
        raise
    nn.ModuleList(attached_methods(model).values()).eval()
    return set_routing(model, hard=hard)


def build_adapter_methods(
    model: PreTrainedModel, folder: str | Path, *, check_base: bool = True
) -> dict[int, AttentionMethod]:
    """Build the methods of a saved adapter by layer, to swap in.

    Raises:
        UserError: as `load_adapter` does, and where the layers differ from the attached ones.
    """
    description, tensors = read_adapter(model, folder, check_base=check_base)
    attached = attached_methods(model)
    if sorted(description["layers"]) != sorted(attached):
        raise UserError(f"the adapter in {folder} must have layers {sorted(attached)} (got {description['layers']}).")
    methods = {i: build(description["method"], m.shape, **description["options"]).eval() for i, m in attached.items()}
    load_tensors(methods, tensors, folder)
    return methods


def read_adapter(
    model: PreTrainedModel, folder: str | Path, *, check_base: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read description and tensors of an adapter; UserError for another base."""
    folder = find_adapter(folder)
    description, path, samples = read_description(folder), folder / WEIGHTS, sample_parameters(model)
    try:
        tensors = load_file(path)
        if nan := next((name for name, tensor in tensors.items() if tensor.isnan().any()), None):
            raise ValueError(f"{nan} has NaN")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({error}). Copy the adapter again.") from None
    base, actual, saved = description["base_model"], hash_samples(samples), tensors.pop(SAMPLES, None)
    is_cast = saved is not None and are_casts(saved, join_samples(samples))
    if base["fingerprint"] != actual and not is_cast:
        mismatch = (
            f"the adapter in {folder} belongs to {base['name']} (fingerprint {base['fingerprint'][:12]}), but this "
            f"model is {model.config.name_or_path or type(model).__name__} (fingerprint {actual[:12]})"
        )
        if check_base:
            raise UserError(
                f"{mismatch}. Load the adapter's own base model: {BASE_HINT}. For a quantized copy of it use "
                "check_base=False (command line: check_base=false)."
            )
        log.warning("check_base=False: %s", mismatch)
    # another version of transformers may have other fields
    trained, config = base.get("arithmetic", {}), select_numerics(model.config)
    if changed := sorted(name for name in trained.keys() & config.keys() if trained[name] != config[name]):
        log.warning("the adapter in %s was trained on these weights with another %s", folder, ", ".join(changed))
    return description, tensors


def load_tensors(methods: dict[int, AttentionMethod], tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Load an adapter's tensors into methods; UserError unless all fit."""
    try:
        for index, method in methods.items():
            prefix = f"layers.{index}."
            names = [name for name in tensors if name.startswith(prefix)]
            method.load_state_dict({name.removeprefix(prefix): tensors.pop(name) for name in names})
        if tensors:
            raise RuntimeError(f"unexpected {', '.join(tensors)}")
    except RuntimeError as error:
        path = find_adapter(folder) / WEIGHTS
        raise UserError(f"{path} does not fit its own description ({error}). Copy the adapter again.") from None
