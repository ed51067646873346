"""Logits, losses and config hashes equal the committed golden numbers."""

import json

import pytest
from golden import numerics


@pytest.fixture(scope="module")
def golden():
    return json.loads(numerics.GOLDEN.read_text(encoding="utf-8"))


def test_logits_of_tiny_families_equal_golden(golden):
    assert list(numerics.differences(golden["logits"], numerics.compute_logits())) == []


def test_losses_of_tiny_runs_equal_golden(golden, tmp_path):
    assert list(numerics.differences(golden["losses"], numerics.compute_losses(tmp_path))) == []


def test_config_hashes_of_committed_runs_equal_golden(golden):
    hashes = numerics.compute_config_hashes(every=5)
    assert hashes and {key: golden["config_hashes"][key] for key in hashes} == hashes
