"""The long-range suite: answers are beyond the window, and the files are the same bytes everywhere."""

import hashlib
import random
import re
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from focus_exp.assets import cache_root
from focus_exp.data.books import EMBEDDED, WORKS
from focus_exp.data.long_range import (
    CHOICES,
    CONTINUATION_WORDS,
    CUE_WORDS,
    DEPTHS,
    ITEMS,
    ROOM,
    TASKS,
    Book,
    Draws,
    PassageShape,
    build_suite,
)
from focus_exp.errors import UserError
from focus_exp.models.gguf import embedded_folder

DIGEST = "957401624fd4447821fc9743c6f7d77601a0cd30d340fd33c31500acba319f8a"


def write_book(seed: int, sentences: int = 700) -> Book:
    """Write sentences of words that recur, one or two lines each."""
    generator = random.Random(seed)
    vocabulary = ["".join(generator.choices("abcdefghijklmnoprstuvw", k=generator.randint(2, 8))) for _ in range(600)]
    text = ""
    for _ in range(sentences):
        words = generator.choices(vocabulary, weights=[1 / (1 + rank) ** 0.5 for rank in range(600)], k=12)
        words[0] = words[0].capitalize()
        words[generator.randint(2, 10)] += generator.choice(["\n", "", ","])
        text += re.sub("\n ", "\n", " ".join(words)) + generator.choice([".\n", ". ", "!\n\n"])
    return Book(f"book {seed}", text)


BOOKS = [write_book(seed) for seed in range(2)]
SHAPES = st.integers(4, 60).flatmap(lambda w: st.builds(PassageShape, st.just(w), st.integers(w + ROOM, 4 * w + ROOM)))


def on_shapes(test):
    """Call a test with several shapes."""
    return settings(max_examples=4)(given(SHAPES)(test))


def make_items(task: str, shape: PassageShape) -> list[dict]:
    return list(islice(TASKS[task](BOOKS, shape, Draws("items")), ITEMS))


def normalize(text: str) -> list[str]:
    """Return the words in lower case, letters alone."""
    return [re.sub("[^a-z]", "", word.lower()) for word in text.split()]


def find_sequence(words: list[str], wanted: list[str]) -> list[int]:
    """Return where a sequence of words starts."""
    return [i for i in range(len(words)) if words[i : i + len(wanted)] == wanted]


@on_shapes
def test_last_word_occurs_beyond_the_window_alone(shape):
    items = make_items("last_word", shape)
    assert items
    for item in items:
        context, target = item["context"].split(), item["target"].strip()
        assert len(context) == shape.words
        found = find_sequence(normalize(item["context"]), [target])
        assert found and len(context) - found[-1] == item["distance"] > shape.window
        book = next(book for book in BOOKS if book.title == item["book"])
        assert re.search(re.escape(item["context"] + item["target"]) + "[.!?]", book.text)


@on_shapes
def test_continuation_answer_alone_follows_the_passage(shape):
    items = make_items("continuation", shape)
    assert len(items) == ITEMS and {item["answer"] for item in items} == set(range(CHOICES))
    for item in items:
        book = next(book for book in BOOKS if book.title == item["book"])
        end = book.text.index(item["context"]) + len(item["context"])
        assert len(item["context"].split()) == shape.words
        for index, choice in enumerate(item["choices"]):
            assert len(choice.split()) == CONTINUATION_WORDS and choice in book.text
            assert book.text[end:].lstrip().startswith(choice) == (index == item["answer"])
            assert choice not in item["context"]


@on_shapes
def test_passkey_is_beyond_the_window_at_each_depth(shape):
    items = make_items("passkey", shape)
    assert [item["depth"] for item in items[: len(DEPTHS)]] == list(DEPTHS)
    told = {}
    for item in items:
        words, key = item["context"].split(), item["target"].strip()
        found = [i for i, word in enumerate(words) if word.strip(".") == key]
        assert len(found) == 2 and len(words) - found[-1] > shape.window
        told.setdefault(item["depth"], found[-1])
    assert [told[depth] for depth in DEPTHS] == sorted(told.values()) and len(set(told.values())) == len(DEPTHS)


@on_shapes
def test_multi_key_answer_is_the_named_persons_key(shape):
    items = make_items("multi_key", shape)
    # neither the order of the choices nor the place of the key gives the other away
    assert len({(item["depth"], item["answer"]) for item in items}) == CHOICES**2
    for item in items:
        name = re.search(r"The pass key of (\w+) is$", item["context"]).group(1)
        told = dict(re.findall(r"The pass key of (\w+) is (\d+)\.", item["context"]))
        assert told[name] == item["choices"][item["answer"]] and sorted(told.values()) == sorted(item["choices"])
        words = item["context"].split()
        assert all(len(words) - words.index(f"{key}.") > shape.window for key in told.values())


@on_shapes
def test_copying_source_is_beyond_the_window(shape):
    for item in make_items("copying", shape):
        words, target = item["context"].split(), item["target"].split()
        found = find_sequence(words, words[-CUE_WORDS:] + target)
        assert found and len(words) - (found[-1] + CUE_WORDS + len(target)) >= shape.window
        assert "\n" not in item["target"] and item["target"].startswith(" ")


@on_shapes
def test_induction_target_followed_the_same_words(shape):
    for item in make_items("induction", shape):
        words = item["context"].split()
        first, last = find_sequence(words, words[-CUE_WORDS:])
        assert last == shape.words * 4 // 3 == len(words) - CUE_WORDS
        assert words[first + CUE_WORDS] == item["target"].strip() and len(words) - (first + CUE_WORDS) > shape.window


@pytest.fixture
def books(monkeypatch):
    books = replace(EMBEDDED["books"], read=lambda cache, split: [(b.title, b.text) for b in BOOKS * (split == "test")])
    monkeypatch.setitem(EMBEDDED, "books", books)


def test_build_suite_gives_the_same_bytes(tmp_path, books):
    first, again, other = (build_suite(tmp_path / place, window) for place, window in (("a", 20), ("b", 20), ("a", 21)))
    assert first.digest == again.digest != other.digest and first.folder.name == again.folder.name
    assert first.folder != other.folder and first.digest[:16] in first.folder.name
    files = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in again.folder.iterdir()}
    assert set(files) == {f"{task}.jsonl" for task in TASKS}
    assert first.digest == hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()
    before = (first.folder / "passkey.jsonl").stat().st_mtime_ns
    assert build_suite(tmp_path / "a", 20).items("passkey") == first.items("passkey")
    assert (first.folder / "passkey.jsonl").stat().st_mtime_ns == before


def test_draws_are_stable():
    draws = Draws("0 passkey")
    assert [draws.below(1000) for _ in range(5)] == [144, 53, 444, 987, 965]
    assert sorted(draws.sample(range(9), 9)) == list(range(9))


def test_build_suite_unfit_length_raises(tmp_path, books):
    assert build_suite(tmp_path, 100).shape == PassageShape(100, 300)
    assert build_suite(tmp_path, 4).shape == PassageShape(4, 4 + ROOM)
    with pytest.raises(UserError, match=r"124 words.*window of 60 .got 90"):
        build_suite(tmp_path, 60, 90)
    with pytest.raises(UserError, match=r"\d{4} words or fewer.*got 50000"):
        build_suite(tmp_path, 60, 50_000)


@pytest.mark.real
def test_build_suite_books_are_the_recorded_ones_and_fit_the_models():
    cache = cache_root(None)
    suite, tokenizer = build_suite(cache, 128), AutoTokenizer.from_pretrained(embedded_folder(cache))
    assert suite.digest == DIGEST
    assert {item["book"] for item in suite.items("last_word")} <= {w for works in WORKS["test"].values() for w in works}
    # the books hold no more last words
    assert {task: len(suite.items(task)) for task in TASKS} == dict.fromkeys(TASKS, ITEMS) | {"last_word": 195}
    items = [item for task in TASKS for item in suite.items(task)]
    lengths = [len(ids) for ids in tokenizer([item["context"] for item in items])["input_ids"]]
    # each answer after its own passage, as the model reads them
    whole = [item["context"] + answer for item in items for answer in item.get("choices", [item.get("target")])]
    assert min(lengths) >= 4 * 128 and max(len(ids) for ids in tokenizer(whole)["input_ids"]) <= 1024
