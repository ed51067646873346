"""The long-range suite: what is asked lies beyond the window, and the bytes are the same wherever it is built."""

import hashlib
import random
import re
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import run
from transformers import AutoTokenizer

from focus_exp.assets import cache_root
from focus_exp.data import long_range
from focus_exp.data.books import WORKS
from focus_exp.data.long_range import ITEMS, ROOM, build_suite
from focus_exp.data.long_range_items import CHOICES, CONTINUATION_WORDS, CUE_WORDS, DEPTHS, MAKERS, Book, Draws, Shape
from focus_exp.errors import UserError
from focus_exp.models.embedded import embedded_folder
from focus_exp.models.random import byte_tokenizer

DIGEST = "be34e310ee838351ab70c4aeace94ecd472ada6ae59ffbfef7813c82e8c00eaf"


def write_book(seed: int, sentences: int = 700) -> Book:
    """Sentences of words that come back now and then, one or two lines each."""
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
SHAPES = st.integers(4, 60).flatmap(lambda w: st.builds(Shape, st.just(w), st.integers(w + ROOM, 4 * w + ROOM)))


def items_of(task: str, shape: Shape) -> list[dict]:
    return list(islice(MAKERS[task](BOOKS, shape, Draws("items")), ITEMS))


def plain(text: str) -> list[str]:
    """Words without what is not a letter, in lower case."""
    return [re.sub("[^a-z]", "", word.lower()) for word in text.split()]


def places(words: list[str], wanted: list[str]) -> list[int]:
    """Where a sequence of words begins."""
    return [i for i in range(len(words)) if words[i : i + len(wanted)] == wanted]


@given(SHAPES)
@settings(max_examples=8)
def test_the_last_word_stands_in_the_passage_but_not_within_the_window(shape):
    items = items_of("last_word", shape)
    assert items
    for item in items:
        context, target = item["context"].split(), item["target"].strip()
        assert len(context) == shape.words
        found = places(plain(item["context"]), [target])
        assert found and len(context) - found[-1] == item["distance"] > shape.window
        book = next(book for book in BOOKS if book.title == item["book"])
        assert re.search(re.escape(item["context"] + item["target"]) + "[.!?]", book.text)


@given(SHAPES)
@settings(max_examples=8)
def test_only_the_right_continuation_goes_on_where_the_passage_ends(shape):
    items = items_of("continuation", shape)
    assert len(items) == ITEMS and {item["answer"] for item in items} == set(range(CHOICES))
    for item in items:
        book = next(book for book in BOOKS if book.title == item["book"])
        end = book.text.index(item["context"]) + len(item["context"])
        assert len(item["context"].split()) == shape.words
        for index, choice in enumerate(item["choices"]):
            assert len(choice.split()) == CONTINUATION_WORDS and choice in book.text
            assert book.text[end:].lstrip().startswith(choice) == (index == item["answer"])
            assert choice not in item["context"]


@given(SHAPES)
@settings(max_examples=8)
def test_keys_are_told_once_beyond_the_window_at_every_depth(shape):
    items = items_of("passkey", shape)
    assert [item["depth"] for item in items[: len(DEPTHS)]] == list(DEPTHS)
    told = {}
    for item in items:
        words, key = item["context"].split(), item["target"].strip()
        found = [i for i, word in enumerate(words) if word.strip(".") == key]
        assert len(found) == 2 and len(words) - found[-1] > shape.window
        told.setdefault(item["depth"], found[-1])
    assert [told[depth] for depth in DEPTHS] == sorted(told.values()) and len(set(told.values())) == len(DEPTHS)


@given(SHAPES)
@settings(max_examples=8)
def test_the_right_choice_is_the_key_of_who_is_asked_for(shape):
    items = items_of("multi_key", shape)
    # neither the order of the choices nor the place of the key gives the other away
    assert len({(item["depth"], item["answer"]) for item in items}) == CHOICES**2
    for item in items:
        name = re.search(r"The pass key of (\w+) is$", item["context"]).group(1)
        told = dict(re.findall(r"The pass key of (\w+) is (\d+)\.", item["context"]))
        assert told[name] == item["choices"][item["answer"]] and sorted(told.values()) == sorted(item["choices"])
        words = item["context"].split()
        assert all(len(words) - words.index(f"{key}.") > shape.window for key in told.values())


@given(SHAPES)
@settings(max_examples=8)
def test_what_is_to_be_copied_stands_beyond_the_window(shape):
    for item in items_of("copying", shape):
        words, target = item["context"].split(), item["target"].split()
        found = places(words, words[-CUE_WORDS:] + target)
        assert found and len(words) - (found[-1] + CUE_WORDS + len(target)) >= shape.window
        assert "\n" not in item["target"] and item["target"].startswith(" ")


@given(SHAPES)
@settings(max_examples=8)
def test_induction_asks_for_what_followed_the_same_words_before(shape):
    for item in items_of("induction", shape):
        words = item["context"].split()
        first, last = places(words, words[-CUE_WORDS:])
        assert last == shape.words * 4 // 3 == len(words) - CUE_WORDS
        assert words[first + CUE_WORDS] == item["target"].strip() and len(words) - (first + CUE_WORDS) > shape.window


def test_distances_in_words_hold_in_tokens():
    tokenizer, shape = byte_tokenizer(), Shape(20, 90)
    for task in MAKERS:
        for item in items_of(task, shape)[:10]:
            assert len(tokenizer(item["context"])["input_ids"]) >= len(item["context"].split()) >= shape.words


@pytest.fixture
def books(monkeypatch):
    monkeypatch.setattr(
        long_range, "read_books", lambda cache, split: [(b.title, b.text) for b in BOOKS * (split == "test")]
    )


def test_the_same_bytes_wherever_and_whenever_it_is_built(tmp_path, books):
    first, again, other = (build_suite(tmp_path / place, window) for place, window in (("a", 20), ("b", 20), ("a", 21)))
    assert first.digest == again.digest != other.digest and first.folder.name == again.folder.name
    assert first.folder != other.folder and first.digest[:16] in first.folder.name
    files = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in again.folder.iterdir()}
    assert set(files) == {"suite.json", *(f"{task}.jsonl" for task in MAKERS)}
    del files["suite.json"]
    assert first.digest == hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()
    before = (first.folder / "passkey.jsonl").stat().st_mtime_ns
    assert build_suite(tmp_path / "a", 20).items("passkey") == first.items("passkey")
    assert (first.folder / "passkey.jsonl").stat().st_mtime_ns == before


def test_draws_never_change():
    draws = Draws("0 passkey")
    assert [draws.below(1000) for _ in range(5)] == [144, 53, 444, 987, 965]
    assert sorted(draws.sample(range(9), 9)) == list(range(9))


def test_a_passage_has_room_for_what_it_holds(tmp_path, books):
    assert build_suite(tmp_path, 100).shape == Shape(100, 300)
    assert build_suite(tmp_path, 4).shape == Shape(4, 4 + ROOM)
    with pytest.raises(UserError, match=r"90 words is too short for a window of 60; use 124 or more"):
        build_suite(tmp_path, 60, 90)
    with pytest.raises(UserError, match=r"room for passages of 50000 words; use \d{4} or less"):
        build_suite(tmp_path, 60, 50_000)


@pytest.mark.real
def test_the_suite_of_the_books_is_the_one_that_records_name():
    suite = build_suite(cache_root(None), 128)
    assert suite.digest == DIGEST
    assert {item["book"] for item in suite.items("last_word")} <= {w for works in WORKS["test"].values() for w in works}
    assert all(len(suite.items(task)) == ITEMS for task in MAKERS)


@pytest.mark.real
def test_requests_have_four_windows_of_tokens_and_fit_the_models_of_the_paper():
    suite, tokenizer = (
        build_suite(cache_root(None), 128),
        AutoTokenizer.from_pretrained(embedded_folder(cache_root(None))),
    )
    items = [item for task in MAKERS for item in suite.items(task)]
    lengths = [len(ids) for ids in tokenizer([item["context"] for item in items])["input_ids"]]
    longest = max(
        len(tokenizer(answer)["input_ids"]) for item in items for answer in item.get("choices", [item.get("target")])
    )
    assert min(lengths) >= 4 * 128 and max(lengths) + longest <= 1024


@pytest.mark.real
def test_a_command_builds_the_suite_and_says_its_hash():
    result = run("job=build_tasks", "eval.long_range_distance=128")
    assert result.code == 0, result.err
    assert f"sha256 {DIGEST}" in result.out
