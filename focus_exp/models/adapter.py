"""The trained part alone, on disk and on the hub: safetensors for the numbers, JSON for what they belong to."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.assets import ADAPTER_FILES, adapter_folder
from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.registry import build, find
from focus_exp.config import upgrade_options
from focus_exp.errors import UserError, first_line
from focus_exp.models.attach import attach, detach
from focus_exp.models.load import fingerprint, gather_tensor, materialize, select_numerics
from focus_exp.models.methods import attached_methods, get_attachment, is_causal, set_routing, unwrapped_state_dict
from focus_exp.storage import atomic_write

log = logging.getLogger(__name__)
WEIGHTS, DESCRIPTION, CARD = ADAPTER_FILES
FORMAT = 1
HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]  # whichever client the hub's package has
BASE_HINT = "the command line takes it by model.path=<its folder> or model.hub_id=<owner/name>"
FIELDS = {
    "method": str, "options": dict, "layers": list, "causal": bool, "trainable_parameters": int, "base_model": dict,
}  # fmt: skip


def save_adapter(
    model: PreTrainedModel, folder: str | Path, extra: dict[str, Any] | None = None, write: bool = True
) -> Path:
    """Write the attached method's weights and buffers and their description into `folder`.

    The description names the base model by a hash of its weights and by its arithmetic, the method with its options,
    the parameter count and whether the method is causal; `extra` adds to it. An error leaves an older adapter in
    `folder` as it was. Where base or method is sharded over processes all of them call this, and one may `write`.

    Raises:
        UserError: the method is wrapped so that `load_adapter` could not read what would be written.
    """
    folder = Path(folder)
    attachment = get_attachment(model)
    methods = attached_methods(model)
    tensors: dict[str, Tensor] = {}
    trainable = 0
    for index, method in methods.items():
        with materialize(model, method):
            found = unwrapped_state_dict(method).items()
            state = {name: gather_tensor(tensor.detach()).cpu().contiguous() for name, tensor in found}
        with torch.random.fork_rng(devices=[]):
            built = build(attachment.method, method.shape, **attachment.options)
        check_loadable(state, built, method, index)
        trainable += sum(parameter.numel() for parameter in built.parameters())
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in state.items()}
    description = {
        "format": FORMAT,
        "method": attachment.method,
        "options": attachment.options,
        "layers": attachment.layers,
        "causal": is_causal(model),
        "trainable_parameters": trainable,
        "base_model": {
            "name": base_name(model),
            "model_type": model.config.model_type,
            "revision": getattr(model.config, "_commit_hash", None),
            "fingerprint": fingerprint(model),
            "arithmetic": select_numerics(model.config),
        },
        **(extra or {}),
    }
    if not write:
        return folder
    with atomic_write(folder / WEIGHTS) as weights, atomic_write(folder / DESCRIPTION) as text:
        save_file(tensors, weights)
        text.write_text(json.dumps(description, indent=2, default=Tensor.tolist) + "\n", encoding="utf-8")
    return folder


def check_loadable(state: dict[str, Tensor], built: AttentionMethod, method: AttentionMethod, index: int) -> None:
    """UserError unless `state`, of the attached `method`, fits `built`, which `load_adapter` would make."""
    shapes, wanted = ({name: tuple(t.shape) for name, t in values.items()} for values in (state, built.state_dict()))
    if shapes == wanted:
        return
    name = min(name for name, _ in shapes.items() ^ wanted.items())
    known = {type(module) for module in built.modules()}
    kinds = {type(m).__name__ for m in method.modules() if type(m) not in known and not is_plain(m)}
    raise UserError(
        f"layer {index}: the attached method cannot be saved: {name} would not load again"
        f"{' (wrapped by ' + ', '.join(sorted(kinds)) + ')' if kinds else ''}. Call "
        "merge_and_unload(), or take the wrapper off, before save_adapter."
    )


def is_plain(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def base_name(model: PreTrainedModel) -> str:
    """Its name on the hub; of a folder the last part, for an adapter goes to other machines."""
    base = getattr(model, "get_base_model", lambda: model)()  # below PEFT's
    name: str = model.config.name_or_path or type(base).__name__.removeprefix("FSDP")
    return Path(name).name if Path(name).is_absolute() else name


def push_to_hub(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload what `save_adapter` wrote, and the card beside it, to `repo_id` (owner/name), made if need be; its URL.

    UserError without an adapter in `folder`, and where the hub refuses or cannot be reached.
    """
    read_description(folder)
    hub = HfApi(token=token)
    try:
        hub.create_repo(repo_id, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=[*ADAPTER_FILES]))
    except LocalTokenNotFoundError as error:
        raise UserError(f"the hub does not know who uploads {repo_id}; run: hf auth login") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"{folder} was not uploaded to {repo_id}: {first_line(error)}") from error
    except HTTP_ERROR as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"{folder} was not uploaded to {repo_id}, for the hub cannot be reached ({reason}); call push_to_hub again "
            "where there is a network"
        ) from error


def read_description(folder: str | Path) -> dict[str, Any]:
    """The JSON of an adapter, in a folder or on the hub; UserError when it is missing, damaged or of a newer format."""
    path = adapter_folder(folder) / DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (found := description["format"]) != FORMAT:
            raise UserError(f"{path} has format {found}, this version reads format {FORMAT}")
        check_types(description, FIELDS)
        base = {"arithmetic": {}} | description["base_model"]  # adapters of before say nothing of it
        check_types(base, {"name": str, "fingerprint": str, "arithmetic": dict})
        for layer in description["layers"]:
            check_types({"layers": layer}, {"layers": int})
    except FileNotFoundError:
        there = "" if Path(folder).is_dir() else ": there is no such folder"
        raise UserError(f"{folder} holds no {DESCRIPTION}{there}; give a run's folder, or its adapter/") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); copy the adapter again") from None
    try:
        method = find(description["method"], imports=False)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    description["options"] = upgrade_options(description["options"], method.options)
    if unknown := sorted(set(description["options"]) - {item.name for item in fields(method.options)}):
        raise UserError(
            f"{path}: method {description['method']} has no options {', '.join(unknown)}; copy the adapter again, "
            "or use the version of focus_exp that wrote it"
        )
    return description


def adapter_name(folder: str | Path) -> str:
    """Of the run that an adapter comes from."""
    path = Path(folder)
    return path.parent.name if path.name == "adapter" else path.name


def check_types(values: dict[str, Any], kinds: dict[str, type]) -> None:
    """KeyError or TypeError where a value is missing, or not exactly of its type."""
    for name, kind in kinds.items():
        if type(values[name]) is not kind:
            raise TypeError(f"{name}: expected {kind.__name__}, found {str(values[name])[:40]}")


def load_adapter(
    model: PreTrainedModel, folder: str | Path, *, hard: bool = True, check_base: bool = True
) -> PreTrainedModel:
    """Attach what `save_adapter` wrote, ready for use with hard groups (or soft gates with hard=False).

    What is attached is in eval mode, whatever the model's; `model.train()` trains it further.
    `folder` may be an adapter on the hub: owner/name, or owner/name@revision. With `check_base=False` the base may
    have other weights than those the adapter was trained on, as a quantized copy has; its shapes must fit.

    Raises:
        UserError: the adapter was trained for other base weights, or its files are damaged; then nothing is attached.
    """
    description, tensors = read_adapter(model, folder, check_base=check_base)
    try:
        attach(model, description["method"], layers=description["layers"], **description["options"])
    except UserError as error:
        raise UserError(f"the adapter in {folder} cannot be attached: {error}") from error
    try:
        fill(attached_methods(model), tensors, folder)
    except UserError:
        detach(model)
        raise
    nn.ModuleList(attached_methods(model).values()).eval()
    return set_routing(model, hard=hard)


def build_adapter_methods(
    model: PreTrainedModel, folder: str | Path, *, check_base: bool = True
) -> dict[int, AttentionMethod]:
    """What `save_adapter` wrote, by layer, to stand where another method is attached to `model`.

    UserError as of `load_adapter`, and where the adapter is of other layers than the attached method.
    """
    description, tensors = read_adapter(model, folder, check_base=check_base)
    attached = attached_methods(model)
    if sorted(description["layers"]) != sorted(attached):
        raise UserError(
            f"the adapter in {folder} is of other layers than {get_attachment(model).method} is attached to"
        )
    methods = {i: build(description["method"], m.shape, **description["options"]).eval() for i, m in attached.items()}
    fill(methods, tensors, folder)
    return methods


def read_adapter(
    model: PreTrainedModel, folder: str | Path, *, check_base: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read description and tensors of an adapter; UserError unless it belongs to this base, or `check_base` is off."""
    folder = adapter_folder(folder)
    description = read_description(folder)
    wanted, found = description["base_model"], fingerprint(model)
    if wanted["fingerprint"] != found:
        named = base_name(model)
        differ = (
            f"the adapter in {folder} belongs to {wanted['name']} (fingerprint {wanted['fingerprint'][:12]}), "
            f"but this model is {model.config.name_or_path or type(model).__name__} (fingerprint {found[:12]})"
        )
        if check_base:
            alike = ": same name, other weights; call load_adapter before resize_token_embeddings or merging"
            raise UserError(
                f"{differ}; load the adapter's own base model{alike if wanted['name'] == named else ''}; {BASE_HINT}; "
                "for a quantized copy of it check_base=False (command line: check_base=false)"
            )
        log.warning("check_base is off: %s", differ)
    # another version of transformers may know other names
    known, here = wanted.get("arithmetic", {}), select_numerics(model.config)
    if changed := sorted(name for name in known.keys() & here.keys() if known[name] != here[name]):
        log.warning("the adapter in %s was trained on these weights under another %s", folder, ", ".join(changed))
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
        if spoilt := [name for name, tensor in tensors.items() if tensor.isnan().any()]:
            raise ValueError(f"{spoilt[0]} holds NaN")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({error}); copy the adapter again") from None
    return description, tensors


def fill(methods: dict[int, AttentionMethod], tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Give methods by layer their numbers; UserError unless each finds its own, and none is left."""
    try:
        for index, method in methods.items():
            prefix = f"layers.{index}."
            names = [name for name in tensors if name.startswith(prefix)]
            if any(parameter.is_meta for parameter in method.parameters()):
                raise UserError(
                    f"layer {index} is offloaded, and its attached method with it; load the adapter before accelerate "
                    "moves the layers"
                )
            method.load_state_dict({name.removeprefix(prefix): tensors.pop(name) for name in names})
        if tensors:
            raise RuntimeError(f"unexpected {', '.join(tensors)}")
    except RuntimeError as error:
        path = adapter_folder(folder) / WEIGHTS
        raise UserError(f"{path} does not fit its own description ({error}); copy the adapter again") from None
