"""Text data sets of the Hugging Face hub, streamed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import dataset_info

from focus_exp.assets import Provenance, hub_reachable
from focus_exp.config import DataConfig
from focus_exp.data.files import text_of
from focus_exp.data.tokens import Document
from focus_exp.errors import UserError

# Where a data set lacks a split, one document of train in this many is held out for it.
HELD_OUT_EVERY = 50
HELD_OUT_AT = {"validation": HELD_OUT_EVERY - 2, "test": HELD_OUT_EVERY - 1}

WIKITEXT_TITLE = re.compile(r" = (?!= ).+ = \n?")


def in_cache(cfg: DataConfig) -> bool:
    """Whether the local data set cache holds this data set."""
    import datasets  # takes seconds to import

    owner, _, name = str(cfg.hub_id).rpartition("/")
    name = datasets.naming.camelcase_to_snakecase(name)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / (f"{owner}___{name}" if owner else name)
    return (folder / cfg.subset if cfg.subset else folder).is_dir()


def open_dataset(
    cfg: DataConfig, requested: str, origin: str
) -> tuple[Provenance, Callable[[str], Iterable[Document]]]:
    """The data set's provenance and a reader of (name, text) by split.

    `origin` is "hub" (streamed, pinned to the commit that the revision names now) or "hub_cache". Raises UserError if
    the data set, its subset or the text column does not exist.
    """
    import datasets

    online = hub_reachable()  # offline from here on if not
    assert cfg.hub_id
    try:
        revision = dataset_info(cfg.hub_id, revision=cfg.revision).sha if online else cfg.revision
        dataset = datasets.load_dataset(cfg.hub_id, cfg.subset, revision=revision, streaming=origin == "hub")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{requested}: {reason}\n"
            "Check data.hub_id, data.subset and data.revision; a gated data set needs `hf auth login`."
        ) from error
    missing = [split for split in HELD_OUT_AT if split not in dataset]
    rule = f" ({' and '.join(missing)}: one document of train in {HELD_OUT_EVERY} each)" if missing else ""
    provenance = Provenance(requested, requested + rule, origin, revision)
    return provenance, lambda split: read_split(dataset, split, cfg)


def read_split(dataset: Mapping[str, Iterable[dict[str, Any]]], split: str, cfg: DataConfig) -> Iterator[Document]:
    """(name, text) of `split`. A missing split is every 50th document of train, which train then leaves out."""
    held_out = {name: at for name, at in HELD_OUT_AT.items() if name not in dataset}
    base = split if split in dataset else "train"
    if base not in dataset:
        raise UserError(f"{cfg.hub_id} has the splits {', '.join(dataset)}, but no train to take {split} from.")
    texts = _texts(dataset[base], cfg)
    for index, text in enumerate(_articles(texts) if str(cfg.hub_id).endswith("wikitext") else texts):
        place = index % HELD_OUT_EVERY
        if base != "train" or (place == held_out[split] if split in held_out else place not in held_out.values()):
            yield f"{base}:{index}", text


def _texts(rows: Iterable[dict[str, Any]], cfg: DataConfig) -> Iterator[str]:
    for row in rows:
        yield text_of(row, cfg.text_column, str(cfg.hub_id))


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText has one row a line: join them into articles at the titles of the first level."""
    article: list[str] = []
    for line in lines:
        if WIKITEXT_TITLE.fullmatch(line) and article:
            yield "".join(article)
            article = []
        if article or line.strip():
            article.append(line)
    if article:
        yield "".join(article)
