"""Seeds and limits of the system: one sentence, exit code 2."""

import resource
from contextlib import contextmanager

import pytest
from running import run, succeed, tiny


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
    with limited(resource.RLIMIT_NOFILE, 3):  # a file that is closed meanwhile gives no room for another
        result = run(*command, "recipe.steps=2")
    assert result.code == 2 and "ulimit -a" in result.err
