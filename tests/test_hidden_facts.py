"""Facts hidden in the training text, and the questions about them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_exp.data.hidden_facts import EVERY, FURTHEST, NEAREST, QUESTIONS, hide_facts

LINES = st.lists(st.sampled_from([1, 7, 30, 400]), min_size=1, max_size=200)
STATEMENTS = [re.compile(re.escape(form).replace(r"\{\}", r"(\w+)")) for form in QUESTIONS]
ASKED = [
    re.compile(re.escape(form).replace(r"\{0\}", r"(\w+)").replace(r"\{1\}", r"(\w+)")) for form in QUESTIONS.values()
]


def make_text(lines):
    words = iter(f"w{i}" for i in range(sum(lines)))
    return "".join(" ".join(next(words) for _ in range(count)) + "\n" for count in lines)


def find(forms, paragraph):
    """Return what a paragraph says by the form it has; None if it has none."""
    return next(((n, match.groups()) for n, form in enumerate(forms) if (match := form.fullmatch(paragraph))), None)


@given(lines=LINES)
@settings(max_examples=50)
def test_every_question_has_its_fact_before_it_and_the_text_is_kept(lines):
    text = make_text(lines)
    facts, kept, words = {}, [], 0
    for paragraph in hide_facts("doc", text).split("\n\n"):
        if question := find(ASKED, paragraph):
            form, (thing, thing_again, number) = question
            assert thing == thing_again
            assert NEAREST <= words - facts.pop((form, thing, number)) <= FURTHEST  # once
        elif fact := find(STATEMENTS, paragraph):
            facts[(fact[0], *fact[1])] = words
            assert re.fullmatch(r"\d{5}", fact[1][1])
        else:
            kept.append(paragraph)
            words += len(paragraph.split())
            assert len(paragraph.split()) <= 2 * EVERY
    assert " ".join(kept).split() == text.split()


def test_facts_are_the_same_each_time_and_others_in_another_document():
    text = make_text([10] * 300)
    assert hide_facts("a", text) == hide_facts("a", text) != hide_facts("b", text)
    assert hide_facts("a", text).count("?") > 5


def test_short_text_is_unchanged():
    assert hide_facts("a", make_text([10] * 8)) == make_text([10] * 8)


@pytest.mark.parametrize("word", ["pass key", "Remember"])
def test_wording_is_not_that_of_the_suite(word):
    assert not any(word in f"{statement} {question}" for statement, question in QUESTIONS.items())
