"""`make faults`, in short: a few of its rows, and that its table tells the truth. The whole takes minutes."""

import signal

import bad_files as files
import fault_rows as faults
import pytest
from faults import BAD_SETTINGS, main, rows, table
from running import Result, run

from focus_exp.training.callbacks import GateAnnealing

QUICK = ("recipe.phases.router.steps=2", "recipe.phases.everything.steps=4", "eval.max_sequences=1")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """With its twin; commands that nothing is done to run in this process."""
    launch = faults.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "SETTINGS", [*faults.SETTINGS, *QUICK])
        for module in (faults, files):
            patch.setattr(module, "launch", lambda command, *stage: launch(command, *stage) if stage else run(*command))
        bench = faults.Bench(tmp_path_factory.mktemp("faults"))
        bench.make_twin()
        yield bench


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_checkpoint_is_survived(bench):
    row = faults.stopped(bench, "a checkpoint is written", signal.SIGKILL)
    assert (row.problems, row.survived, row.equal) == ([], True, True)


def test_bad_input_is_refused_and_every_row_of_the_table_is_there(bench):
    done = [files.refused(bench, setting, setting) for setting in BAD_SETTINGS[:2]]
    assert all(not row.problems and not row.survived and row.said.startswith("error: ") for row in done)
    assert len(rows(bench)) > 100
    text = table(done)
    assert "**2 rows: 0 survived with the undisturbed record, 2 refused" in text and "0 with a stack trace" in text
    assert text.count("| refused | error: ") == 2 and str(bench.folder) not in text


@pytest.mark.parametrize(
    "result, problem",
    [
        (Result(1, "", "Traceback (most recent call last):\nValueError: x"), "stack trace"),
        (Result(0, "", ""), "ended with 0, not 2"),
        (Result(2, "", "error: a\nerror: b"), "printed 2 errors"),
    ],
)
def test_what_goes_wrong_is_a_problem_and_leaves_no_table(bench, tmp_path, monkeypatch, result, problem):
    row = faults.checked(bench, "it", [(result, 2)], None)
    assert any(problem in said for said in row.problems)
    monkeypatch.setattr("faults.rows", lambda _: [lambda: row])
    monkeypatch.setattr(faults.Bench, "make_twin", lambda _: None)
    assert main(tmp_path / "faults.md") == 1 and not (tmp_path / "faults.md").exists()


def test_another_record_than_the_twins_is_a_loss(bench, monkeypatch):
    def spoil(self, trainer, module):
        next(iter(module.model.parameters())).data.mul_(1.01)

    monkeypatch.setattr(GateAnnealing, "on_train_end", spoil)
    row = faults.checked(bench, "it", [(run(*bench.command("spoilt")), 0)], "spoilt")
    assert row.equal is False and "1 with anything lost" in table([row])
