"""The command line: options, exit codes, limits of the system. test_messages.py has the wording."""

import re
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from conftest import build, remembered
from running import record_of, router_steps, run, succeed, tiny

from focus_exp import __main__ as command_line
from focus_exp.cli import order_arguments
from focus_exp.errors import EXTRAS


def start(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


@pytest.mark.parametrize(("option", "shown"), [("--help", "+experiment="), ("--cfg job", "job: train")])
def test_help_and_configuration_do_not_import_torch(option, shown):
    result = start("-X", "importtime", "-m", "focus_exp", *option.split())
    assert result.returncode == 0 and shown in result.stdout
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr, flags=re.MULTILINE))
    assert "hydra" in imported and not imported & {"torch", "transformers"}


def test_process_with_bad_input_exits_with_2_and_no_stack_trace(tmp_path):
    result = start("-m", "focus_exp", f"runs_dir={tmp_path}", "attention.groups=0")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert not list(tmp_path.iterdir())


def test_process_with_a_closed_stdout_exits_with_sigpipe():
    command = [sys.executable, "-u", "-m", "focus_exp", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE


def test_options_are_accepted_at_any_position():
    arguments = ["seed=0,1", "-m", "job=report", "--cfg", "job", "--config-dir=x", "~data", "a=b=c"]
    ordered = ["-m", "--cfg", "job", "--config-dir=x", "seed=0,1", "job=report", "~data", "a=b=c"]
    assert order_arguments(arguments) == ordered == order_arguments(ordered)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "text"), RuntimeError("shapes do not fit")])
def test_errors_of_the_program_are_raised(tmp_path, monkeypatch, error):
    monkeypatch.setattr(command_line, "execute", Mock(side_effect=error))
    with pytest.raises(type(error)):
        run(*tiny(tmp_path))


def test_missing_package_of_an_extra_names_the_extra(tmp_path, monkeypatch):
    for name in ("focus_exp.jobs.analyze", "focus_exp.evaluation.groups"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "focus_exp.evaluation.words", None)
    monkeypatch.setitem(EXTRAS, "focus_exp.evaluation.words", "evaluation")
    result = run(*tiny(tmp_path), "job=analyze")
    assert result.code == 2 and "focus_exp[evaluation]" in result.err
    assert not (tmp_path / "runs").exists()


def test_missing_text_is_refused_before_a_model_is_loaded(tmp_path):
    build("tiny_llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    result = run(*tiny(tmp_path), f"model.path={tmp_path / 'model'}", f"data.files={tmp_path}/*.nothing")
    assert result.code == 2 and result.err.startswith("error: data.files")


def test_nonfinite_loss_stops_the_run(tmp_path):
    result = run(*tiny(tmp_path), router_steps(4), "recipe.phases.router.learning_rate=1e38")
    assert result.code == 2 and "recipe.phases.*.learning_rate" in result.err
    record = record_of(tmp_path)
    assert record.status == "failed" and "step 3" in record.error


@contextmanager
def limited(kind, value):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_run_with_the_largest_seed_is_trained(tmp_path):
    succeed(*tiny(tmp_path), "recipe.steps=1", f"seed={2**32 - 1}")


@pytest.mark.parametrize("kilobytes", [1, 16])
def test_run_under_a_file_size_limit_is_one_error(tmp_path, kilobytes):
    with limited(resource.RLIMIT_FSIZE, kilobytes * 1024):
        result = run(*tiny(tmp_path), "recipe.steps=2")
    assert result.code == 2, result.err
    assert "ulimit -a" in result.err and result.err.count("error:") == 1
    succeed(*tiny(tmp_path), "recipe.steps=2")


def test_run_under_a_limit_of_open_files_is_one_error(tmp_path):
    command = tiny(tmp_path)
    remembered.clear()  # so that hydra opens conf/config.yaml
    with limited(resource.RLIMIT_NOFILE, 3):  # a file that is closed meanwhile gives no room for another
        result = run(*command, "recipe.steps=2")
    assert result.code == 2 and "ulimit -a" in result.err
