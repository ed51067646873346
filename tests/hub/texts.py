"""Data sets with the names, splits and columns of those in conf/data and lm-eval, of sentences drawn from a grammar."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow
from pyarrow import parquet

Rows = list[dict[str, Any]]
WORDS = {
    "noun": "house river captain letter garden winter sailor child horse window market church field bridge night "
    "doctor village kitchen forest island journey candle teacher soldier mirror harbour stone engine story mountain",
    "adjective": "old quiet broken green distant heavy bright narrow gentle ancient cold sudden proud empty early",
    "verb": "saw found left carried followed remembered opened crossed painted lost feared bought built watched",
    "adverb": "slowly never always quickly often again once suddenly gladly",
    "place": "near under behind beyond across inside",
    "name": "Anna Thomas Clara Edward Martha Henry Alice George",
}
WORD_LISTS = {kind: words.split() for kind, words in WORDS.items()}


class Writer(random.Random):
    """Draws words and sentences."""

    def __getattr__(self, kind: str) -> str:
        """Draw a word of a kind: `writer.noun`."""
        if kind not in WORDS:
            raise AttributeError(kind)
        return self.choice(WORD_LISTS[kind])

    def sentence(self) -> str:
        subject = self.choice([self.name, f"The {self.adjective} {self.noun}"])
        action = f"{self.verb} a {self.adjective} {self.noun}"
        reason = f"because {self.name} {self.verb} the {self.noun} in {self.randint(1600, 1900)}"
        return f"{subject} {action} {self.choice([f'{self.place} the {self.noun}', self.adverb, reason])}."

    def prose(self, words: int) -> str:
        """Write paragraphs of at least `words` words."""
        paragraphs: list[str] = []
        while words > 0:
            paragraphs.append(" ".join(self.sentence() for _ in range(self.randint(3, 7))))
            words -= paragraphs[-1].count(" ") + 1
        return "\n\n".join(paragraphs)


def book(w: Writer) -> Rows:
    return [{"short_book_title": w.noun, "publication_date": 1850, "url": "", "text": w.prose(9000)}]


def article(w: Writer) -> Rows:
    """An article of WikiText: a row a line."""
    paragraphs = [f" {paragraph} \n" for paragraph in w.prose(2500).split("\n\n")]
    return [{"text": line} for line in ("", f" = {w.name} {w.noun} = \n", "", *paragraphs, " = = Notes = = \n")]


def page(w: Writer) -> Rows:
    return [{"text": w.prose(w.randint(200, 3000))}]


def hellaswag(w: Writer) -> Rows:
    row = {
        "activity_label": w.noun.title(),
        "ctx_a": w.sentence(),
        "ctx_b": w.name.lower(),
        "label": str(w.randrange(4)),
    }
    return [row | {"endings": [w.sentence() for _ in range(4)]}]


def arc(w: Writer) -> Rows:
    choices = {"text": w.sample(WORD_LISTS["noun"], 4), "label": list("ABCD")}
    return [{"id": w.name, "question": f"What did {w.name} find?", "choices": choices, "answerKey": w.choice("ABCD")}]


def piqa(w: Writer) -> Rows:
    return [{"goal": w.sentence(), "sol1": w.sentence(), "sol2": w.sentence(), "label": w.randrange(2)}]


def lambada(w: Writer) -> Rows:
    return [{"text": f"{w.sentence()} {w.name} saw the {w.noun}"}]


def truthful(w: Writer) -> Rows:
    mc1, mc2 = (
        {"choices": [w.sentence() for _ in range(4)], "labels": labels} for labels in ([1, 0, 0, 0], [1, 1, 0, 0])
    )
    return [{"question": f"Who built the {w.noun}?", "mc1_targets": mc1, "mc2_targets": mc2}]


def gsm8k(w: Writer) -> Rows:
    more, less = w.randint(20, 40), w.randint(1, 19)
    question = f"{w.name} had {more} candles and lost {less} of them. How many candles are left?"
    return [{"question": question, "answer": f"{more} - {less} = {more - less} are left.\n#### {more - less}"}]


Repository = tuple[str | None, dict[str, tuple[str, Callable[[Writer], Rows], int]]]


def parquets(folder: str, make: Callable[[Writer], Rows], **counts: int) -> dict[str, Any]:
    return {f"{folder}/{split}-00000-of-00001.parquet": (split, make, count) for split, count in counts.items()}


FEW = {"train": 12, "validation": 12, "test": 12}
# id -> configuration (None: it has no card), file -> split, what makes its rows, how many documents
DATA_SETS: dict[str, Repository] = {
    "emozilla/pg19": ("default", parquets("data", book, train=12, validation=4, test=6)),
    "Salesforce/wikitext": (
        "wikitext-103-raw-v1",
        parquets("wikitext-103-raw-v1", article, train=40, validation=5, test=8),
    ),
    # the branch of the Hub's own conversion
    "Skylion007/openwebtext": (None, {"plain_text/train/0000.parquet": ("train", page, 300)}),
    "Rowan/hellaswag": ("default", parquets("data", hellaswag, **FEW)),
    "allenai/ai2_arc": ("ARC-Easy", parquets("ARC-Easy", arc, **FEW)),
    "baber/piqa": ("default", parquets("data", piqa, **FEW)),
    "EleutherAI/lambada_openai": ("default", {"data/lambada_test.jsonl": ("test", lambada, 12)}),
    "truthfulqa/truthful_qa": ("multiple_choice", parquets("multiple_choice", truthful, validation=12)),
    "openai/gsm8k": ("main", parquets("main", gsm8k, train=12, test=12)),
}


def write_data_set(folder: Path, name: str) -> None:
    """Write the files of a data set, and the card that names its configuration."""
    configuration, files = DATA_SETS[name]
    for place, (_, make, count) in files.items():
        file, writer = folder / place, Writer(f"{name}/{place}")
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for _ in range(count) for row in make(writer)]
        if file.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if configuration:
        data_files = [{"split": split, "path": place} for place, (split, _, _) in files.items()]
        card = {"configs": [{"config_name": configuration, "data_files": data_files}]}  # JSON is YAML
        (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n", encoding="utf-8")


def sample_texts(cache: Path | None) -> Iterator[str]:
    """Yield prose for tokenizers: what the data sets are made of, and the books of focus_exp or Python's manual.

    With the books their words take about as many tokens as with the real tokenizers, so that as many fit a model.
    """
    from focus_exp.data.books import EMBEDDED

    yield Writer(0).prose(20_000)
    yield "Question: How many? What? Who?\nAnswer: The answer is yes. No. Q: A:\n" * 100
    yield from topics.values() if cache is None else (text for _, text in EMBEDDED["books"].read(cache, "train"))
