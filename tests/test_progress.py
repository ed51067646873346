"""Progress: a bar on a terminal, ten lines in a log."""

import io
from contextlib import redirect_stderr

import pytest

from focus_exp import progress
from focus_exp.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("process", ["0", "1"])
def test_only_the_first_process_writes(process, monkeypatch):
    monkeypatch.setenv("RANK", process)
    with redirect_stderr(Terminal()) as written:
        assert list(ProgressBar(range(3), desc="training", leave=True)) == [0, 1, 2]
    assert ("training: 100%" in written.getvalue()) == (process == "0")


@pytest.mark.parametrize(("total", "lines"), [(47, 9), (20, 10), (3, 3)])
def test_a_log_has_a_line_for_every_tenth(total, lines, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_WITHOUT", 1e-9)
    assert len([*ProgressBar(range(total), desc="training")]) == total
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert all(line.startswith("training:") and "<" in line for line in printed)


def test_a_log_has_no_line_of_a_short_stage(capsys):
    list(ProgressBar(range(20), desc="training"))
    assert not capsys.readouterr().err
