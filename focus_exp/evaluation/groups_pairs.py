"""What was measured on the passage, for the record and for the page."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.stats import spearmanr
from torch import Tensor

from focus_exp.evaluation.groups_observe import Grouping
from focus_exp.evaluation.groups_passage import Cut, Keys
from focus_exp.evaluation.groups_words import CLASSES, Passage
from focus_exp.records.groups import DistantPair, GroupReport
from focus_exp.storage import replace_file


def describe_cut(report: GroupReport, cut: Cut, passage: Passage, listed: int) -> None:
    """Fill in what `report` says of the passage; `listed` pairs a layer, half by affinity, half by mass."""
    for row in report.layers:
        lies = cut.masses[Grouping(row.layer, row.head)]
        row.near_mass, row.kept_mass, row.cut_mass = (float(part.mean()) for part in (lies.near, lies.kept, lies.cut))
        if lies.cut.any():
            row.cut_key = int(lies.cut_by_key.argmax())
            row.cut_key_word = passage.words[row.cut_key]
            row.cut_key_share = float(lies.cut_by_key.max() / lies.cut_by_key.sum())
        if lies.distant_pairs:
            row.distant_pairs_kept = len(lies.kept_affinities) / lies.distant_pairs
        if len(lies.kept_affinities):
            row.affinity_median = float(lies.kept_affinities.median())
        row.pairs = [
            *best_pairs(lies.close_keys, "affinity", listed - listed // 2, passage),
            *best_pairs(lies.kept_keys, "mass", listed // 2, passage),
        ]
    report.cut_cost = cut_cost(cut)


def best_pairs(keys: Keys, by: Literal["affinity", "mass"], number: int, passage: Passage) -> list[DistantPair]:
    """The highest over the first of every query's `keys` (indices, mass, affinity), no key more than once."""
    indices, mass, affinity = (part[:, 0] for part in keys)
    measure = mass if by == "mass" else affinity
    found: dict[int, DistantPair] = {}
    for query in measure.sort(descending=True, stable=True).indices.tolist():
        key = int(indices[query])
        if len(found) == number or measure[query] <= 0:
            break
        pair = DistantPair(
            query=query, key=key, query_word=passage.words[query], key_word=passage.words[key],
            affinity=float(affinity[query]), mass=float(mass[query]), by=by,
        )  # fmt: skip
        found.setdefault(key, pair)
    return list(found.values())


def cut_cost(cut: Cut) -> float | None:
    """Spearman's correlation of what a query lost, over all layers, with the rise of the next token's loss."""
    lost = torch.stack([lies.cut for lies in cut.masses.values()]).mean(0)[:-1]
    rise = (cut.nll_hard - cut.nll_full)[1:]
    distant = lost > 0
    if distant.sum() < 3:
        return None
    found = float(spearmanr(lost[distant], rise[distant]).statistic)
    return found if isfinite(found) else None


def write_passage(path: Path, cut: Cut, passage: Passage) -> None:
    """What the page shows that the record does not hold: token by token, layer by layer."""
    content = {
        "pieces": passage.pieces,
        "classes": [CLASSES.index(kind) for kind in passage.classes],
        "class_names": CLASSES,
        "nll_full": rounded(cut.nll_full, 3),
        "nll_hard": rounded(cut.nll_hard, 3),
        "layers": [layer_content(grouping, cut) for grouping in cut.masses],
    }
    replace_file(path, json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())


def layer_content(grouping: Grouping, cut: Cut) -> dict[str, Any]:
    """groups: of a token, as a key where that is another than as a query; kept, cut: each query's mass there, the rest
    of it is near; kept_keys, cut_keys: [[key, mass, affinity], ...], heaviest first; query_groups, key_groups: a
    token's where it has more than one."""
    selection, lies = cut.selections[grouping], cut.masses[grouping]
    confidence, groups = selection.effective_key_assignment[0].max(-1)
    members: dict[str, Any] = {}
    if selection.group is None and selection.query_groups is not None and selection.key_groups is not None:
        members = {
            "query_groups": [of_token.nonzero()[:, 0].tolist() for of_token in selection.query_groups[0]],
            "key_groups": [of_token.nonzero()[:, 0].tolist() for of_token in selection.key_groups[0]],
        }
    return {
        **members,
        "layer": grouping.layer,
        "head": grouping.head,
        "groups": groups.tolist(),
        "confidence": rounded(confidence, 3),
        "kept": rounded(lies.kept, 4),
        "cut": rounded(lies.cut, 4),
        "kept_keys": keys_of(lies.kept_keys),
        "cut_keys": keys_of(lies.cut_keys),
    }


def keys_of(keys: Keys) -> list[list[list[float]]]:
    indices, mass, affinity = (part.tolist() for part in keys)
    return [
        [[j, round(m, 4), round(a, 3)] for j, m, a in zip(*of_query, strict=True) if m >= 5e-5]
        for of_query in zip(indices, mass, affinity, strict=True)
    ]


def rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]
