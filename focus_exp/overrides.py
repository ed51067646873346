"""Quote the text values of command-line overrides, so that Hydra's grammar takes any path literally."""

from __future__ import annotations

import os
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from hydra.core.override_parser.types import Quote, QuotedString

from focus_exp.config import Config
from focus_exp.config_attention import KNOWN

PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_./][\w./@-]*", re.IGNORECASE | re.ASCII)
QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)
# left to Hydra: null, no value, interpolations
RESERVED = re.compile(r"null|\?\?\?|.*\$\{.*", re.IGNORECASE | re.DOTALL)
SWEEP_FUNCTION = re.compile(r"(choice|glob|range|interval|sort|shuffle|extend_list)\(")
ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")  # Hydra's own escapes outside of quotes
# an element of a list, commas within quotes or brackets being part of it
ELEMENT = re.compile(
    r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?:\[[^\[\]]*\]|\([^()]*\)|\{[^{}]*\}|[^,])*?)\s*(?:,|$)""", re.DOTALL
)


def quote_override(override: str, multirun: bool = False) -> str:
    """Quote the value of `key=value` if the key holds text or a list of texts.

    Args:
        override: as typed; what is quoted already stays as it is.
        multirun: a comma outside of quotes separates the values of a sweep.
    """
    key, _, value = override.partition("=")
    if value.startswith("~/"):  # shells expand it at the start of an argument only
        value = os.path.expanduser(value)
    name = key.lstrip("+")
    texts, lists = _text_keys()
    is_list = name in lists or f"{name.rpartition('.')[0]}.*" in lists
    if not value or key.startswith(("-", "~")) or not (is_list or name in texts) or RESERVED.fullmatch(value):
        if not value or key.startswith("-") or set(value) & set("\\'\"()[]{}"):
            return override
        return f"{key}=" + value.replace("=", "\\=")
    if multirun and SWEEP_FUNCTION.match(value):
        return override
    quote = _quote_list if is_list else quote_text
    return f"{key}={','.join(map(quote, _split(value))) if multirun else quote(value)}"


def quote_text(text: str) -> str:
    """Quote `text` for Hydra's grammar unless it is quoted or needs no quotes."""
    if QUOTED.fullmatch(text) or PLAIN.fullmatch(text):
        return text
    quoted: str = QuotedString(text=ESCAPED.sub(r"\1", text), quote=Quote.single).with_quotes()
    return quoted


def _quote_list(value: str) -> str:
    if not (value.startswith("[") and value.endswith("]")):
        return quote_text(value)
    return f"[{','.join(map(quote_text, _split(value[1:-1])))}]"


def _split(values: str) -> list[str]:
    return [found[1] for found in ELEMENT.finditer(values) if found[1]]


@cache
def _text_keys() -> tuple[frozenset[str], frozenset[str]]:
    """Find the keys whose value is a free text, and those of lists of texts (`tables.*`: of every key below)."""
    texts, lists = {"hydra.sweep.dir"}, set[str]()

    def walk(schema: Any, prefix: str) -> None:
        hints = get_type_hints(schema)
        for item in fields(schema):
            key, kind = prefix + item.name, hints[item.name]
            if is_dataclass(kind):
                walk(kind, f"{key}.")
            elif str in (kind, *get_args(kind)) and kind in (str, str | None) and not item.metadata.get("choices"):
                texts.add(key)
            elif kind == list[str]:
                lists.add(key)
            elif kind == dict[str, list[str]]:
                lists.add(f"{key}.*")

    walk(Config, "")
    for schema in KNOWN.values():
        walk(schema, "attention.")
    return frozenset(texts - {"experiment", "variant"}), frozenset(lists)  # choices of groups
