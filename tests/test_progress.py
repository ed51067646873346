"""Progress: a bar on a terminal, little in a log."""

import io
import sys

import pytest

from focus_exp.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stderr(monkeypatch, kind=io.StringIO):
    monkeypatch.setattr(sys, "stderr", kind())  # in a fixture pytest's own would replace it again
    return sys.stderr


def test_log_without_short_work(monkeypatch):
    log = stderr(monkeypatch)
    assert list(ProgressBar(range(100), desc="reading")) == list(range(100))
    assert log.getvalue() == ""


@pytest.mark.parametrize("leave", [False, True])
def test_terminal_has_its_bar_at_once(leave, monkeypatch):
    terminal = stderr(monkeypatch, Terminal)
    bar = ProgressBar(total=2, desc="reading", leave=leave)
    assert "reading:   0%" in terminal.getvalue()
    bar.close()
    assert terminal.getvalue().endswith("\n" if leave else "\r")


@pytest.mark.parametrize("process", ["0", "1"])
def test_only_the_first_process_writes(process, monkeypatch):
    written = stderr(monkeypatch, Terminal)
    monkeypatch.setenv("RANK", process)
    assert list(ProgressBar(range(3), desc="training", leave=True)) == [0, 1, 2]
    assert ("training: 100%" in written.getvalue()) == (process == "0")
