"""Progress: a bar on a terminal, little in a log."""

import io
import sys

import pytest

from focus_exp.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("process", ["0", "1"])
def test_only_the_first_process_writes(process, monkeypatch):
    written = Terminal()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("RANK", process)
    assert list(ProgressBar(range(3), desc="training", leave=True)) == [0, 1, 2]
    assert ("training: 100%" in written.getvalue()) == (process == "0")
