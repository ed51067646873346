"""The contract of `attach` on architectures of different mechanisms; the table covers all of transformers."""

import re

import pytest
import transformers
from architectures import TABLE
from attach_contract import FAILURES, examine
from tiny_architectures import names

KEPT = ["llama", "gpt_oss", "llama4_text", "gemma3n_text", "phimoe", "opt", "qwen3_next", "deepseek_v3", "bart"]


@pytest.mark.parametrize("name", KEPT)
def test_attached_model_is_exact(name: str) -> None:
    row = examine(name)
    assert row.outcome == "exact", row.why


@pytest.mark.parametrize("name", ["mamba", "qwen4_exp_text"])  # no attention; one that narrows its mask by an indexer
def test_unsupported_attention_is_refused(name: str) -> None:
    assert examine(name).outcome == "refused"


def test_table_covers_every_architecture_and_finds_none_wrong() -> None:
    text = TABLE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| \w* \| (\w+) \|", text, re.MULTILINE)[1:]
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip("the table is of another version of transformers")
    assert [name for name, _ in rows] == sorted(names())
    assert [name for name, outcome in rows if outcome in FAILURES] == []
