"""What a record shows, in plain words computed from its rows."""

from __future__ import annotations

from focus_exp.records.answers import DOMINANT, configured_row, is_comparable, is_configured, keeps_everything
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.reporting.tables import change_text, perplexity_text, share_text

SAME_DENSITY = 0.02
# nats a token: the same function computed along two paths differs by less
ROUNDING = 1e-6


def findings(record: Record) -> list[str]:
    """Sentences on the verdict, the soft-to-hard gap, the controls and everything that spoils a comparison."""
    hard = configured_row(record)
    return [
        *_run(record, hard),
        *_adaptations(record),
        *(_verdict(record, hard) if hard else []),
        *(_gap(record, hard) if hard else []),
        *(_controls(record, hard) if hard else []),
        *_leak(record),
        *_dominance(record),
        *_warnings(record),
    ]


def _run(record: Record, hard: Row | None) -> list[str]:
    said = []
    if record.status != "finished":
        said.append(f"The run {record.status} ({record.error or 'no reason recorded'}): what follows is partial.")
    if record.base is None:
        said.append("There is no scored base row, so nothing can be compared with full attention.")
    method = record.setting("attention", "method", "full")
    if method == "full":
        if not any(row.kind == "trained" for row in record.rows):
            said.append("Only full attention was asked for: there is no sparse attention to judge.")
        return said
    if record.steps == 0 and record.method.get("trainable_parameters"):
        said.append("Nothing was trained in this run.")
    if method == "focus" and hard is None and not any(is_configured(record, row) for row in record.rows):
        top_k, rule = record.setting("attention", "top_k"), record.setting("attention", "pair_rule")
        said.append(f"There is no row for {method} at its configured k={top_k} under the rule {rule}: no verdict.")
    return said


def _adaptations(record: Record) -> list[str]:
    """What has no router to judge: LoRA, full fine-tuning, other attention methods."""
    said = []
    method = record.setting("attention", "method", "full")
    for row in record.rows:
        other = row.kind == "control" and row.method == method
        if not (row.kind == "trained" or other) or row.delta_nll is None or record.base is None:
            continue
        outcome = difference_word(row.delta_nll, row.delta_low, row.delta_high, ("better than", "worse than"))
        change = _change(row.delta_nll, row.delta_low, row.delta_high)
        count = record.method.get("trainable_parameters") or 0
        pairs = f"removes {share_text(row.pairs_removed)} of the pairs" if other else "keeps every pair"
        said.append(
            f"{row.name}: {outcome} the base, perplexity {perplexity_text(row.perplexity)} against "
            f"{perplexity_text(record.base.perplexity)} ({change}); it {pairs}; {count:,} parameters were trained on "
            f"{record.tokens_seen:,} tokens."
        )
    return said


def _verdict(record: Record, hard: Row) -> list[str]:
    base = record.base
    if base is None or hard.delta_nll is None:
        return []
    said = difference_word(hard.delta_nll, hard.delta_low, hard.delta_high, ("better than", "worse than"))
    change = _change(hard.delta_nll, hard.delta_low, hard.delta_high)
    return [
        f"{hard.name} is {said} the base: perplexity {perplexity_text(hard.perplexity)} against "
        f"{perplexity_text(base.perplexity)} ({change}).",
        f"{hard.name} keeps {share_text(hard.distant_pairs_kept)} of the distant pairs and removes "
        f"{share_text(hard.pairs_removed)} of all causal pairs.",
    ]


def difference_word(delta: float, low: float | None, high: float | None, words: tuple[str, str]) -> str:
    """`words` for a negative and a positive difference of losses, unless its interval includes 0 or it is rounding."""
    if abs(delta) < ROUNDING or (low is not None and high is not None and low <= 0 <= high):
        return "indistinguishable from"
    return words[0] if delta < 0 else words[1]


def _change(delta: float, low: float | None, high: float | None) -> str:
    return change_text(delta, low, high) + (", no interval" if low is None or high is None else "")


def _gap(record: Record, hard: Row) -> list[str]:
    soft = next((row for row in record.rows if row.kind == "soft" and row.method == hard.method and row.scored), None)
    if soft is None or soft.nll is None or hard.nll is None:
        return []
    return [
        f"Soft-to-hard gap: pruning changes the perplexity of the soft gate from {perplexity_text(soft.perplexity)} "
        f"to {perplexity_text(hard.perplexity)} ({change_text(hard.nll - soft.nll)})."
    ]


def _leak(record: Record) -> list[str]:
    """What an assignment that reads the future gains over the same router without it."""
    said = []
    for twin in record.rows:
        if twin.kind != "twin" or twin.nll is None or twin.delta_vs_hard is None:
            continue
        low, high = twin.delta_vs_hard_low, twin.delta_vs_hard_high
        word = difference_word(twin.delta_vs_hard, low, high, ("better than", "worse than"))
        said.append(
            f"{twin.name}: perplexity {perplexity_text(twin.perplexity)}, {word} the same router reading the future "
            f"({_change(twin.delta_vs_hard, low, high)}, paired)."
        )
    return said


def _controls(record: Record, hard: Row) -> list[str]:
    controls = [row for row in record.rows if row.kind == "control" and is_comparable(row)]
    configured = record.setting("attention", "window", 0)
    said = []
    for row in controls:
        if row.method == "random_groups" and row.top_k not in (None, hard.top_k):
            continue
        if row.method == "random_groups":
            said.append(_against(hard, row, "random groups"))
        elif row.method == "window" and (row.window or configured) <= configured:
            said.append(_against(hard, row, f"window and sinks alone (w={row.window or configured})"))
        elif row.method == "window":
            said.append(_against(hard, row, f"a wider window (w={row.window})"))
        else:
            said.append(_against(hard, row, row.name))
    return said


def _against(hard: Row, control: Row, label: str) -> str:
    numbers = f"perplexity {perplexity_text(hard.perplexity)} against {perplexity_text(control.perplexity)}"
    if control.delta_vs_hard is not None:
        low, high = control.delta_vs_hard_low, control.delta_vs_hard_high
        said = difference_word(control.delta_vs_hard, low, high, ("worse than", "better than"))
        numbers += f", the control {_change(control.delta_vs_hard, low, high)} relative to it, paired"
    else:
        said, intervals = _unpaired(hard, control)
        numbers += f", {intervals}"
    return f"{hard.name} is {said} {label}: {numbers}; {_density(hard, control)}."


def _unpaired(hard: Row, control: Row) -> tuple[str, str]:
    word = "better than" if (hard.nll or 0.0) < (control.nll or 0.0) else "worse than"
    if hard.delta_low is None or hard.delta_high is None or control.delta_low is None or control.delta_high is None:
        return word, "no intervals"
    if hard.delta_low <= control.delta_high and control.delta_low <= hard.delta_high:
        return "not separated from", "the intervals against the base overlap"
    return word, "the intervals against the base do not overlap"


def _density(hard: Row, control: Row) -> str:
    if hard.pairs_removed is None or control.pairs_removed is None:
        return "their densities are not known"
    removed = f"{share_text(hard.pairs_removed)} and {share_text(control.pairs_removed)} of the pairs removed"
    same = abs(hard.pairs_removed - control.pairs_removed) <= SAME_DENSITY
    return f"same density ({removed})" if same else f"different densities ({removed})"


def _dominance(record: Record) -> list[str]:
    rows = [row for row in record.rows if row.largest_group is not None and row.largest_group > DOMINANT]
    said = []
    if rows:
        named = ", ".join(f"{share_text(row.largest_group)} in {row.name}" for row in rows)
        said.append(f"Warning: one group holds more than half of the tokens ({named}): routing has lost its balance.")
    measured = record.group_shares or []
    shares = dict(zip(record.layers or range(len(measured)), measured, strict=False))
    layers = [layer for layer, groups in shares.items() if max(groups, default=0.0) > DOMINANT]
    if layers:
        worst = max(layers, key=lambda layer: max(shares[layer]))
        said.append(
            f"Warning: on held-out text one group holds more than half of the tokens in {len(layers)} of "
            f"{len(shares)} layers, at worst {share_text(max(shares[worst]))} in layer {worst}."
        )
    return said


def _warnings(record: Record) -> list[str]:
    said = []
    groups = record.setting("attention", "groups")
    for row in record.rows:
        if row.error is not None:
            said.append(f"{row.name} failed: {row.error}")
            continue
        if not row.scored:
            said.append(f"{row.name} has no finite loss ({row.nll}): its numbers mean nothing.")
        if not row.causal:
            said.append(f"{row.name} is not causal: its perplexity reads the future and must not be compared.")
        if keeps_everything(row):
            how = f": k={row.top_k} of K={groups} under the rule {row.pair_rule}" if row.top_k else ""
            said.append(f"{row.name}{how} keeps every pair: this is full attention, not a result.")
        elif row.engaged is False:
            said.append(
                f"{row.name} is not engaged: its mask removes only {share_text(row.pairs_removed)} of the causal "
                "pairs, so its score is close to the base by construction."
            )
    return said
