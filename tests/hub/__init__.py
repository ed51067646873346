"""A local Hub with tiny models and data sets under the ids that conf/ and lm-eval name, built from code alone."""

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .server import Hub

HERE, CONF = Path(__file__).parent, Path(__file__).parent.parent.parent / "conf"


def locate(cache: Path, books: bool) -> Path:
    """Return the folder of what this code builds."""
    sources = [*sorted(HERE.glob("*.py")), *sorted((CONF / "model").glob("*.yaml"))]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    return cache / "rehearsal" / f"{key}{'' if books else '-offline'}"


def find_revisions() -> dict[str, str]:
    """Return the revisions that conf/ pins, by repository."""
    from omegaconf import OmegaConf

    entries = [OmegaConf.load(path) for group in ("model", "data") for path in (CONF / group).glob("*.yaml")]
    return {entry.hub_id: entry.revision for entry in entries if entry.get("hub_id") and entry.get("revision")}


@contextmanager
def serve(cache: Path, books: bool = True) -> Iterator[Path]:
    """Serve the hub from a process of its own, and point the libraries at it: call before they are imported.

    Args:
        cache: where repositories are built, and the libraries keep what they download.
        books: whether tokenizers know the words of the embedded books, which come from the package index.

    Yields:
        The folder of the repositories, below `models` and `datasets`.
    """
    root = locate(cache, books)
    hub = Hub(root, find_revisions())
    os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": f"{root}-home", "HF_HUB_DISABLE_TELEMETRY": "1"}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN"):
        os.environ.pop(name, None)
    from focus_exp.assets import build_once

    def write(folder: Path) -> None:
        from .models import write_model, zoo
        from .texts import DATA_SETS, write_data_set

        for repo_id in zoo():
            write_model(folder / "models" / repo_id, repo_id, cache if books else None)
        for repo_id in DATA_SETS:
            write_data_set(folder / "datasets" / repo_id, repo_id)

    build_once(root, write)
    child = os.fork()
    if child == 0:
        hub.serve_forever()
    hub.socket.close()
    try:
        yield root
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
