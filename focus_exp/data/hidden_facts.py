"""Facts hidden in a text, and questions about them: from such training text a router learns to find single facts.

The wording is not that of the long-range suite.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from focus_exp.data.long_range import Draws

EVERY = 90  # words between insertions, up to twice that where lines are long
NEAREST, FURTHEST = 250, 700  # words between a fact and its question
THINGS = (
    *("anchor", "barrel", "bridge", "candle", "carpet", "chapel", "clock", "drum", "falcon", "ferry"),
    *("garden", "glove", "hammer", "harbour", "island", "jacket", "kettle", "ladder", "lantern", "locket"),
    *("mill", "mirror", "museum", "orchard", "pigeon", "saddle", "tower", "violin", "wagon"),
)
QUESTIONS = {
    "The number of the {} is {}.": "What is the number of the {0}? The number of the {0} is {1}.",
    "The code for the {} is {}.": "Which code is for the {0}? The code for the {0} is {1}.",
    "You will find the {} under {}.": "Where will you find the {0}? You will find the {0} under {1}.",
    "The {} has {} written on it.": "What is written on the {0}? The {0} has {1} written on it.",
}


class Fact(NamedTuple):
    thing: str
    question: str
    place: int  # in words


def hide_facts(name: str, text: str) -> str:
    """Return a document with facts and, later, questions about them as paragraphs of their own.

    They follow the first line end after 90 words, or else 180 words. A fact is a random number of a thing; a question
    comes with its answer. The same name and text give the same result.
    """
    facts: list[Fact] = []
    parts: list[str] = []
    draws, start, last = Draws(f"facts {name}"), 0, -1
    for place, word in enumerate(re.finditer(r"\S+\s*", text)):
        if place - last < (EVERY if "\n" in word[0] else 2 * EVERY):
            continue
        parts.append(text[start : word.end()].rstrip())
        start, last = word.end(), place
        facts = [fact for fact in facts if place - fact.place <= FURTHEST]
        askable = [fact for fact in facts if place - fact.place >= NEAREST]
        if askable and draws.below(5) < 3:
            asked = askable[draws.below(len(askable))]
            facts.remove(asked)
            parts.append(asked.question)
            continue
        free = [thing for thing in THINGS if thing not in {fact.thing for fact in facts}]
        statement, question = [*QUESTIONS.items()][draws.below(len(QUESTIONS))]
        thing, number = free[draws.below(len(free))], 10_000 + draws.below(90_000)
        facts.append(Fact(thing, question.format(thing, number), place))
        parts.append(statement.format(thing, number))
    return "\n\n".join([*parts, text[start:]])
