"""Groups of a router (section 5): sizes, distinctive tokens, word classes, pairs, and a passage coloured by group."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

import pandas as pd

from focus_exp.reporting.figures import COLORS
from focus_exp.reporting.format import ABSENT, format_number, format_percent, format_significant
from focus_exp.reporting.frame import filter_rows, to_rows
from focus_exp.reporting.load import Results
from focus_exp.reporting.paper_specs import paper_rows

PLACE = ("run", "layer", "head")
KEYS = [*PLACE, "group", "causal", "model", "data", "agreement", "word_class", "purity", "size", "tokens"]
GROUP_CELLS = (*PLACE, "group", "model", "data", "word_class")  # recorded of each
SHOWN_PAIRS = 10
LINE = 100  # characters of a passage's line
CHARACTER, HEIGHT = 7.8, 20  # of a monospaced font of 13 pixels [pixels]


def latest_analyses(results: Results) -> pd.DataFrame:
    """Return the measurements of the last analysis of each kind of router, the paper's and this project's."""
    groups = filter_rows(results.complete, {"source": "word groups"})
    latest = dict(zip(zip(groups.attention, groups.is_causal, strict=True), groups.run, strict=True))
    return pd.concat([results.complete[:0], *(results.rows_by_run[run] for run in latest.values())])


def describe_groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each group of each layer.

    Columns: size: fraction of the tokens; word_class, purity: the most frequent class and its fraction; tokens: the
    most distinctive ones, each with how often the group and the text have it; the fraction of each class; agreement:
    adjusted mutual information of the layer's groups and the classes.
    """
    measured = filter_rows(rows, {"source": "analysis", "metric": "ami trained"})
    agreement = {_order(row): row.value for row in to_rows(measured)}
    groups: dict[Any, dict[str, Any]] = {}
    classes: dict[str, float] = {}
    for row in to_rows(filter_rows(rows, {"source": "word groups"})):
        cells = groups.setdefault((*_order(row), row.group), {"agreement": agreement.get(_order(row)), "tokens": ""})
        if row.metric == "class_fraction":
            cells[row.word_class] = row.value
            classes[row.word_class] = classes.get(row.word_class, 0.0) + row.value
        elif row.metric == "group_purity":
            cells["purity"] = row.value
        else:
            cells |= {name: getattr(row, name) for name in GROUP_CELLS if getattr(row, name) is not None}
            cells |= {"size": row.value, "causal": row.is_causal, "tokens": _list_tokens(row)}
    return pd.DataFrame(groups.values(), columns=[*KEYS, *sorted(classes, key=lambda name: -classes[name])])


def _order(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in PLACE)


def _list_tokens(row: Any) -> str:
    """List tokens as code, with their occurrences in the group and in the text."""
    code = ["`" + (token.replace("`", "'") or " ") + "`" for token in row.tokens]
    counts = zip(code, row.token_counts, row.token_totals, strict=True)
    return " ".join(f"{token} {count}/{total}" for token, count, total in counts)


def groups_table(groups: pd.DataFrame) -> pd.DataFrame:
    """Return groups as text: name by class, size, tokens, classes."""
    rows = groups.to_dict("records")
    shown: dict[str, list[str]] = {}
    for name in ("layer", "head"):
        if groups[name].notna().any():
            shown[name] = [format_number(row[name], 0) for row in rows]
    shown["group"] = [str(row["group"]) for row in rows]
    shown["name"] = [name_group(row) for row in rows]
    shown["size [%]"] = [format_percent(row["size"]) for row in rows]
    shown["tokens (in group/in text)"] = [row["tokens"] or ABSENT for row in rows]
    for name in groups.columns[len(KEYS) :]:
        shown[f"{name} [%]"] = [format_percent(row[name], 0) for row in rows]
    return pd.DataFrame(shown)


def name_group(row: dict[str, Any]) -> str:
    """Return the most frequent word class of a group and its percentage."""
    return f"{row['word_class']} ({format_percent(row['purity'], 0)} %)"


def closest_layer(groups: pd.DataFrame) -> pd.DataFrame:
    """Return the groups of the layer, or of its head, that goes best with the word classes."""
    best = groups.loc[groups.agreement.astype(float).idxmax()]
    same = [(groups[name] == best[name]) | (groups[name].isna() & pd.isna(best[name])) for name in PLACE]
    return groups[same[0] & same[1] & same[2]]


def list_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return distant pairs of one group, of the passage, with their words and positions, highest affinity first.

    Those of the paper come first; it names no layer.
    """
    paper = [{"run": "paper", **row} for row in paper_rows("groups_section5_pairs")]
    names = {"key_word": "word", "key": "position", "query_word": "other_word", "query": "other_position"}
    names |= {"is_causal": "causal", "value": "affinity"}
    pairs = filter_rows(rows, {"source": "pairs"})[[*PLACE, *names]].rename(columns=names)
    pairs = pairs.drop_duplicates([*PLACE, "other_position", "position"], keep="last")
    pairs = pairs.sort_values(["run", "affinity"], ascending=[True, False], kind="stable")
    ours = pairs.groupby("run").head(SHOWN_PAIRS)
    table = pd.concat([pd.DataFrame(paper), ours]) if len(ours) else ours
    columns = ["run", "causal", "layer", "head", "word", "position", "other_word", "other_position", "affinity"]
    return table[columns].infer_objects()


def pairs_table(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return pairs as text."""
    rows = pairs.to_dict("records")
    return pd.DataFrame(
        {
            "of": [*pairs.causal.map({True: "ours", False: "paper's router"}).fillna("paper")],
            "layer": [format_number(row["layer"], 0) for row in rows],
            "word": [_show_word(row["word"], row["position"]) for row in rows],
            "later word": [_show_word(row["other_word"], row["other_position"]) for row in rows],
            "affinity": [format_significant(row["affinity"]) for row in rows],
        }
    )


def _show_word(word: str, position: float) -> str:
    return f"`{word.strip() or repr(word)[1:-1]}` ({int(position)})"


def draw_passages(rows: pd.DataFrame) -> dict[str, str]:
    """Return the passage of each run coloured by group, as SVG by name: passage, or passage_paper for the paper's."""
    passages = to_rows(filter_rows(rows, {"source": "passage"}))
    return {"passage_paper" if row.is_causal is False else "passage": draw_passage(row, rows) for row in passages}


def draw_passage(passage: Any, rows: pd.DataFrame) -> str:
    """Return an SVG of a passage's text, each token on the colour of its group."""
    groups = describe_groups(filter_rows(rows, {name: getattr(passage, name) for name in PLACE}))
    names = {row["group"]: f"{row['group']}: {name_group(row)}" for row in groups.to_dict("records")}
    where = f"layer {passage.layer}" + ("" if passage.head is None else f", head {passage.head}")
    titles = f"{passage.model} on {passage.data}", f"Groups of {where}, each named by its most frequent word class"
    drawn, top = [f'<text x="8" y="{20 + HEIGHT * n}">{escape(title)}</text>' for n, title in enumerate(titles)], 54
    for number, (group, name) in enumerate(names.items()):
        x, y = 8 + CHARACTER * LINE / 3 * (number % 3), top + HEIGHT * (number // 3)
        drawn.append(_draw_box(x, y, HEIGHT, group))
        drawn.append(f'<text x="{x + HEIGHT + 6:.1f}" y="{y + 15}">{escape(name)}</text>')
    column, y = 0, top + HEIGHT * (-(-len(names) // 3) + 1)
    for text, group in zip(passage.token_texts, passage.token_groups, strict=True):
        for part in text.replace("\n", "↵\n").splitlines(keepends=True):
            shown = part.removesuffix("\n")
            if column + len(shown) > LINE:
                column, y = 0, y + HEIGHT
            x, width = 8 + CHARACTER * column, CHARACTER * len(shown)
            drawn.append(_draw_box(x, y, width, group))
            drawn.append(
                f'<text x="{x:.1f}" y="{y + 15}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" '
                f'xml:space="preserve">{escape(shown)}</text>'
            )
            column, y = (0, y + HEIGHT) if part.endswith("\n") else (column + len(shown), y)
    size = f'width="{16 + CHARACTER * LINE:.0f}" height="{y + 2 * HEIGHT}"'
    style = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13"'
    body = "\n".join(['<rect width="100%" height="100%" fill="white"/>', *drawn])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def _draw_box(x: float, y: float, width: float, group: int) -> str:
    color = COLORS[group % len(COLORS)]
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 1}" fill="{color}" fill-opacity="0.4"/>'
