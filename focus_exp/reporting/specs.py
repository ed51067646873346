"""The data files of this package: entries as dataclasses; expressions and pages by Jinja, failing on unknown names."""

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, TemplateSyntaxError
from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from focus_exp.errors import UserError
from focus_exp.reporting import formats


class SpecError(UserError):
    """A part of a data file that says what cannot be; whoever reads the file adds the place."""


Entries = TypeVar("Entries")


@cache
def read_yaml(name: str) -> dict[str, Any]:
    """A data file beside this module."""
    text = (files("focus_exp.reporting") / f"{name}.yaml").read_text(encoding="utf-8")
    # not PyYAML itself, to which 1.0e6 is a string
    content: Any = OmegaConf.to_container(OmegaConf.create(text))
    return content


def read_specs(name: str, entries: type[Entries]) -> Entries:
    """The entries of a data file: `read_specs("tables", dict[str, TableSpec])`.

    Raises UserError, with file, entry and key, for an unknown key and for a value of a wrong type.
    """
    return checked(f"{name}.yaml", read_yaml(name), entries)


def checked(name: str, content: Any, entries: type[Entries]) -> Entries:
    """`content` as dataclasses."""
    try:
        return TypeAdapter(entries, config=ConfigDict(extra="forbid")).validate_python(content)
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ": ".join(map(str, wrong["loc"]))
        raise UserError(f"{name}: {place}: {wrong['msg']}, found {str(wrong['input'])[:40]!r}") from error


@cache
def environment() -> Environment:
    """Knows every text of `formats` by its name without `_text`, and the words of the report in capitals."""
    made = Environment(
        loader=PackageLoader("focus_exp.reporting"),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    known = {name.removesuffix("_text"): text for name, text in vars(formats).items() if name.endswith("_text")}
    words = {name: word for name, word in vars(formats).items() if name.isupper() and isinstance(word, str)}
    made.globals |= known | words
    made.filters |= known
    return made


def public(*modules: ModuleType) -> dict[str, Any]:
    """What modules hold under names that do not begin with an underscore."""
    return {name: value for module in modules for name, value in vars(module).items() if not name.startswith("_")}


@cache
def expression(text: str) -> Callable[..., Any]:
    """`text` as a function of the names in it. SpecError if it is none."""
    try:
        return environment().compile_expression(text, undefined_to_none=False)
    except TemplateSyntaxError as error:
        raise SpecError(f"{text!r} is no expression: {error}") from error


@cache
def template(text: str) -> Template:
    """`text` as a template. SpecError if it is none."""
    try:
        return environment().from_string(text)
    except TemplateSyntaxError as error:
        raise SpecError(f"{text!r} is no template: {error}") from error


def render(page: str, **values: Any) -> str:
    """The page that templates/`page`.j2 makes of `values`."""
    return environment().get_template(f"{page}.j2").render(values)
