"""Progress: a bar on a terminal, whole lines in a log."""

import io
import sys

import pytest

from focus_exp.progress import LOG_SECONDS, ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stderr(monkeypatch, kind=io.StringIO):
    monkeypatch.setattr(sys, "stderr", kind())  # in a fixture pytest's own would replace it again
    return sys.stderr


def test_log_gets_one_whole_line_per_interval(monkeypatch):
    log = stderr(monkeypatch)
    bar = ProgressBar(total=10, desc="reading", unit="block")
    bar.start_t = bar.last_print_t = now = 0.0
    bar._time = lambda: now
    for _ in range(10):
        now += LOG_SECONDS / 4
        bar.update()
    bar.close()
    lines = log.getvalue().splitlines(keepends=True)
    assert [line.split("%")[0] for line in lines] == ["reading:  40", "reading:  80"]
    assert all("block" in line and line.endswith("\n") and "\r" not in line for line in lines)


def test_log_without_short_work(monkeypatch):
    log = stderr(monkeypatch)
    assert list(ProgressBar(range(100), desc="reading")) == list(range(100))
    assert log.getvalue() == ""


def test_log_has_the_last_state_with_leave(monkeypatch):
    log = stderr(monkeypatch)
    list(ProgressBar(range(100), desc="training", leave=True))
    assert log.getvalue().startswith("training: 100%|")
    assert log.getvalue().count("\n") == 1


@pytest.mark.parametrize("leave", [False, True])
def test_terminal_has_its_bar_at_once(leave, monkeypatch):
    terminal = stderr(monkeypatch, Terminal)
    bar = ProgressBar(total=2, desc="reading", leave=leave)
    assert "reading:   0%" in terminal.getvalue()
    bar.close()
    assert terminal.getvalue().endswith("\n" if leave else "\r")


def test_disabled_bar_writes_nothing(monkeypatch):
    log = stderr(monkeypatch)
    assert list(ProgressBar(range(3), leave=True, disable=True)) == [0, 1, 2]
    assert log.getvalue() == ""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
@pytest.mark.parametrize("process", ["0", "1"])
def test_only_the_first_process_writes(kind, process, monkeypatch):
    written = stderr(monkeypatch, kind)
    monkeypatch.setenv("RANK", process)
    assert list(ProgressBar(range(3), desc="training", leave=True)) == [0, 1, 2]
    assert ("training: 100%" in written.getvalue()) == (process == "0")
