"""The sentences of findings.yaml, filled in."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Template

from focus_exp.records.groups import ClassCost
from focus_exp.records.rows import Row
from focus_exp.reporting.formats import change_text, difference_word, listed_text
from focus_exp.reporting.specs import environment, expression, read_specs

Difference = tuple[float | None, float | None, float | None]
BETTER, WORSE = "better than", "worse than"


@dataclass(frozen=True)
class Rule:
    """`say` is a sentence on whatever the expression `when` is true of."""

    say: str
    when: str = "true"


def say(name: str, /, **facts: Any) -> str:
    """The sentence of that name. A fact that it asks for and is not given is an error."""
    sentence = entries()[name]
    assert isinstance(sentence, str), f"{name} is a topic"
    return _template(sentence).render(facts)


def tell(topic: str, /, rows: Iterable[Any] = (None,), **facts: Any) -> Iterator[str]:
    """The sentences of a topic that are true of these facts, for every `row` of the rows."""
    rules = entries()[topic]
    assert isinstance(rules, list), f"{topic} is a sentence"
    for known in ({"row": row} | facts for row in rows):
        yield from (_template(rule.say).render(known) for rule in rules if expression(rule.when)(known))


def each(name: str, rows: Iterable[Any], between: str = ", ") -> str:
    """The sentence of that name for every row."""
    return between.join(say(name, row=row) for row in rows)


def all_of(name: str, rows: Iterable[Any]) -> str:
    """The same, the last one after an "and"."""
    return listed_text([say(name, row=row) for row in rows])


def vs_base(row: Row) -> Difference:
    """The difference of losses from the base, with its interval."""
    return row.delta_nll, row.delta_low, row.delta_high


def vs_hard(row: Row) -> Difference:
    """The difference of losses from the hard row, or from the first arm's row, with its interval."""
    return row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high


def cost_of(cost: ClassCost) -> Difference:
    """The difference of losses that hard groups make to a class of tokens, with its interval."""
    return cost.delta, cost.delta_low, cost.delta_high


def than(delta: float | None, low: float | None, high: float | None) -> str:
    """Whether losses that differ by `delta` are better or worse than others, or neither beyond the interval."""
    assert delta is not None
    return difference_word(delta, low, high, (BETTER, WORSE))


def paired(delta: float | None, low: float | None, high: float | None) -> str:
    return change_text(delta, low, high) + (", no interval" if low is None or high is None else "")


@cache
def entries() -> dict[str, str | list[Rule]]:
    return read_specs("findings", dict[str, str | list[Rule]])


@cache
def _template(text: str) -> Template:
    helpers = (say, each, all_of, vs_base, vs_hard, cost_of, than, paired)
    return environment().from_string(text, {helper.__name__: helper for helper in helpers})
