"""The faults of `mutations.py`: each an edit of one place, and the tests that should notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old`, which `file` below focus_exp/ has once, becomes `new`; `why` no test could notice it, where none could."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""


# file -> what becomes what there, which tests ("name" is test_name.py, "name::this" its test_this), and maybe why not
FAULTS: dict[str, list[tuple[str, ...]]] = {
    "attention/routing.py": [
        ("F.normalize(tokens, dim=-1) if self.normalize else tokens", "tokens", "attention attach adapter"),
        ("logits - counted.logsumexp(-2", "logits - logits.logsumexp(-2", "attention attach"),
        ("logits[valid]", "logits.flatten(0, 1)", "attention attach"),
        ("F.normalize(self.centroids, dim=-1) if self.normalize else self.centroids", "self.centroids", "attention"),
    ],
    "attention/focus.py": [
        ("1 - self.balance_momentum)", "self.balance_momentum)", "warm_start"),
        ("self.gate_steepness / 2 if trained", "self.gate_steepness if trained", "attention"),
        ('return self.assignment != "sinkhorn"', "return True", "attach"),
        ("self.gather(tokens, assignment, sequence)", "pass", "stability"),
    ],
    "attention/dual.py": [
        ("return torch.stack(found, 1)", "return torch.stack(found[::-1], 1)", "dual"),
        ("least = thresholds[k - 1]", "least = thresholds[k - 2]", "dual"),
        ("if options.encoders > 1:", "if True:", "dual"),
        ("x = (part - self.mean) / self.scale", "x = part - self.mean", "dual dual_fit"),
        ("times = self.heads if selection.query_groups is None else 1", "times = 1", "dual"),
        ("(position - self.window - self.sinks)", "(position - self.window)", "dual"),
        ("self.gate_steepness / 2 if trained", "self.gate_steepness if trained", "dual"),
    ],
    "attention/recompute.py": [("if in_backward() and self.noted:", "if False:", "attach")],
    "attention/mitigations.py": [
        ("entropy(assignment.mean(0))", "entropy(assignment).mean()", "stability"),
        ("torch.where(count > 0, ", "torch.where(count >= 0, ", "stability"),
    ],
    "attention/selection.py": [
        ("(i - j <= window) |", "(i - j < window) |", "pair_counts attention"),
        ("(j < start + sinks)", "(j <= start + sinks)", "pair_counts attention"),
        (
            "keys & sequence.valid[:, None, :, None]", "keys",
            "attention quality harness::the_ledger_counts_every_pair_of_every_request",
        ),
        ('if pair_rule == "share" else first', 'if pair_rule != "share" else first', "attention"),
        ("2 * top_k > groups", "2 * top_k >= groups", "attention"),
        ("descending=True, stable=True)", "descending=False, stable=True)", "attention"),
        ("max(length - s - window - 1, 0)", "max(length - s - window, 0)", "pair_counts attention"),
        ("mask & sequence.valid[:, None, :length]", "mask", "attach"),
        ("return begun.cummax(1).values", "return begun", "exactness"),
        ("seen & sequence.valid[:, rows, None] & ", "seen & ", "pair_counts attention"),
    ],
    "attention/sparse.py": [
        ("torch.sigmoid(part_lse - old)", "torch.sigmoid(old - part_lse)", "sparse"),
        ("torch.logaddexp(old, part_lse, out=old)", "torch.maximum(old, part_lse, out=old)", "sparse"),
        ("dsink = -torch.exp", "dsink = torch.exp", "sparse"),
        ("(every, added), sign=-1)", "(every, added))", "sparse"),
        ("asks, answers.masked_fill(sink, 0.0))", "asks, answers)", "sparse"),
        ("plan.surrogate / plan.scaling", "plan.surrogate", "sparse"),
    ],
    "attention/side_by_side.py": [("if self.now != stage:", "if False:", "side_by_side")],
    "attention/parts.py": [
        ("searchsorted(keys, queries, right=True)", "searchsorted(keys, queries)", "sparse"),
        ("slice(0, 0 if disjoint else number)", "slice(0, 0)", "sparse"),
        (
            "sink if valid is None else sink & valid", "sink", "sparse",
            "padding is left out of every group again, where parts are cut",
        ),
        ("keys if apart else torch.cat([sink, keys])", "torch.cat([sink, keys])", "sparse"),
    ],
    "attention/blocked.py": [("s = softcap * torch.tanh(s / softcap)", "s = torch.tanh(s / softcap)", "attention")],
    "attention/kernels/window.py": [
        ("(i - j <= window) & (j >= 0)", "(i - j < window) & (j >= 0)", "triton"),
        ("(s < sinks) & (i - j > window)", "(s < sinks) & (i - j >= window)", "triton"),
    ],
    "attention/kernels/groups.py": [
        ("if SHARED:  # counted in the first of the groups that both are in", "if False:", "triton"),
        ("of_keys = rows(dk, slot, groups * D, g * D, inside, D, BD) + ", "of_keys = ", "triton"),
    ],
    "attention/kernels/layout.py": [("(begin, by_query - window)", "(begin, by_query - window + 1)", "triton")],
    "attention/kernels/plain.py": [("squashed, 1 - squashed**2", "squashed, 1.0", "sparse")],
    "attention/kernels/cpu.py": [("if len(rows[0]):", "if False:", "sparse cache")],
    "attention/cached.py": [
        ("(i, j, start, self.window, self.sinks)", "(i, j, start, self.window + 1, self.sinks)", "cache"),
        ("self.length - self.window)", "self.length - self.window - 1)", "cache"),
        ("self.start = self.start[rows]", "pass", "cache"),
        ("for of_row in slices for seen, _ in of_row)", "for of_row in slices for seen, _ in of_row[:1])", "cache"),
        ("slices[row].append((keys[some], values[some]))", "slices[row].append((keys[some], keys[some]))", "cache"),
        ("or self.placed != self.length or count > 1:", "or count > 1:", "cache"),
        ("(place >= 0) & (place < self.sinks)", "(place >= 0) & (place < self.sinks - 1)", "cache"),
        ("near[2] = near[2].where(real[:, recent], -1)", "pass", "cache"),
    ],
    "attention/one_token.py": [
        ("q.transpose(0, 1) * scaling", "q.transpose(0, 1)", "cache"),
        ("zip(p[1:], slices[1:], strict=False)", "zip(p[1:], slices[:-1], strict=False)", "cache"),
        ("merge(out, lse, slice(None), o[0].to(lse.dtype), part[0])", "pass", "cache"),
    ],
    "attention/stores.py": [
        ("int(torch.searchsorted(index, length))", "int(torch.searchsorted(index, length + 1))", "cache"),
        ("self.recent[0] < place:", "self.recent[0] <= place:", "cache"),
    ],
    "models/cache.py": [("layer.groups_of != method.groups_of_keys()", "False", "exactness cache")],
    "models/interface.py": [("if not torch.is_autocast_enabled(kind):", "if True:", "attach")],
    "models/adapter.py": [
        ('wanted["fingerprint"] != found', "False", "adapter"),
        ("if tensor.isnan().any()", "if False", "adapter"),
    ],
    "evaluation/groups_observe.py": [("x[index : index + 1]", "x[:1]", "groups")],
    "evaluation/groups_passage.py": [("selection.assignment_of_keys[:, :length]", "g[:, :length]", "groups")],
    "training/warm_start.py": [
        ("loss = -((mass @ g) * g)", "loss = ((mass @ g) * g)", "warm_start"),
        ("method.router.potential += change", "pass", "warm_start"),
    ],
    "training/module.py": [
        ("0.1 + 0.45 * (1", "0.0 + 0.5 * (1", "training"),
        (
            "states[rank()] if rank() < len(states) else None", "None",
            "resume::every_phase_goes_on_where_it_was",
        ),
    ],
    "training/checkpoints.py": [
        (
            "os.replace(path, before(path))", "path.unlink()",
            "resume::a_damaged_checkpoint_is_named_and_the_one_before_stands_in",
        ),
        (
            'return f"{part} does not fit its checksum"', "return None",
            "resume::a_damaged_checkpoint_is_named_and_the_one_before_stands_in",
        ),
    ],
    "training/callbacks.py": [
        (
            'm["phase"] != self.phase or m["step"] <= trainer.global_step', "True",
            "resume::full_disk_never_leaves_half_a_checkpoint resume::every_phase_goes_on_where_it_was",
        ),
        (
            "or done or trainer.global_step % self.every == 0", "or done",
            "resume::full_disk_never_leaves_half_a_checkpoint",
        ),
        ("self.losses = state_dict", "_ = state_dict", "resume::every_phase_goes_on_where_it_was"),
    ],
    "data/loader.py": [
        ("self._seen, self._resume = self._resume, 0", "self._seen, self._resume = 0, 0", "data"),
        ("self.seed * 1_000_003 + self.epoch", "self.seed * 1_000_003", "data"),
        (
            "[:, self.rank].flatten()", "[:, 0].flatten()",
            "data distributed::every_step_has_the_same_blocks_over_any_number_of_processes",
        ),
    ],
    "data/tokens.py": [
        ("max(1, block_size - stride)", "1", "data"),
        ("if not document[1].strip():", "if False:", "data"),
    ],
    "data/corpora.py": [("caps = [cfg.max_train_tokens, cfg.max_test_tokens]", "caps = []", "data")],
    "data/files.py": [("len(text) * 95 // 100", "len(text) * 90 // 100", "data")],
    "training/importance.py": [
        ("(gradient * output).sum(-1, keepdim=True) - gradient", "-gradient", "dual_fit"),
        ("seen, scaling, softcap, sink_logits,", "seen | True, scaling, softcap, sink_logits,", "dual_fit"),
        ("(seen & ~always_visible(", "(~always_visible(", "dual_fit"),
        ('"attention": lambda pairs: pairs.attention', '"attention": lambda pairs: pairs.loss', "dual_fit"),
    ],
    "training/kept_fit.py": [("spent = seconds_in(path) +", "spent =", "dual_fit")],
    "training/dual_fit.py": [
        ("rules.get(options.counts, state", "rules.get(None, state", "dual_fit"),
        ("seconds = seconds_in(folder / SECONDS, ", "seconds = seconds_in(", "dual_fit"),
    ],
    "training/curves.py": [
        ('if method.counts != "head":', "if False:", "dual_fit"),
        ("gone / (1 - mass).clamp(min=1e-3)", "gone", "dual_fit"),
        ("part.distant.double() @", "torch.ones_like(part.distant).double() @", "dual_fit"),
    ],
    "training/encoder_fit.py": [
        ("loss = (expected.exp() - worth * expected).mean()", "loss = (expected.exp() - expected).mean()", "dual_fit"),
        ("* promises.shape[1]]", "* (promises.shape[1] // 2)]", "dual"),
        ("return ctx.transposed.sums(gradient", "return ctx.transposed.sums(2 * gradient", "dual_fit"),
    ],
    "training/budget.py": [("if cost <= left:", "if True:", "dual_fit")],
    "storage.py": [
        ("for left in (new, old):", "for left in (old,):", "storage"),
        ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "storage"),
    ],
    "records/record.py": [
        ("and not math.isfinite(value) else value", "and False else value", "reporting"),
        ('ConfigDict(extra="forbid", strict=True)', 'ConfigDict(extra="ignore", strict=True)', "reporting"),
    ],
    "records/rows.py": [
        ("return pairs_removed >= ENGAGED", "return pairs_removed > ENGAGED", "benchmark_reporting"),
    ],
    "records/intervals.py": [
        ("float(stdtrit(freedom, 1 - (1 - LEVEL) / 2 / together))", "NORMAL", "intervals"),
        ("if len(numbers) >= FEWEST else", "if len(numbers) > FEWEST else", "intervals"),
        ("c = w**2 / (1 - 2 * w + square)", "c = w**2", "intervals"),
        ("seed_deviation(found) ** 2 / len(found)", "seed_deviation(found) ** 2", "intervals"),
        ("for stderr, _ in known]))", "for stderr, _ in known])) / len(known)", "intervals"),
        ("while count < (", "while False and count < (", "intervals"),
    ],
    "records/losses.py": [
        ("self.nll[name] - other.nll[against]", "other.nll[against] - self.nll[name]", "intervals compare"),
        ("[tokens for _, _, tokens in self.units]", "None", "intervals evaluation quality"),
        ("if self.units != other.units:", "if False:", "intervals compare"),
    ],
    "records/comparison.py": [("found.started != arm.started", "False", "records")],
    "records/metrics.py": [("if number == len(lines):", "if True:", "reporting")],
    "records/answers.py": [
        ('row.kind == "hard"\n', 'row.kind in ("hard", "soft")\n', "reporting compare"),
        ("row.scored and row.causal and not", "row.scored and not", "reporting paper_tables speed_reporting"),
    ],
    "records/speed.py": [("self.full_seconds / self.focus_seconds", "self.focus_seconds", "speed_reporting")],
    "reporting/published.py": [
        ('file.read_text(encoding="utf-8") != expected[name]', "False", "records"),
        (" or folder.relative_to(records) in current", "", "records"),
        (" or Record.load(there).device_kind == record.device_kind", " or True", "records"),
    ],
    "reporting/claims.py": [("if verdict.line else seeds_of(records)", "if False else seeds_of(records)", "claims")],
    "reporting/comparators.py": [
        ("line.high is not None and line.high < limit", "line.low is not None and line.low < limit", "claims"),
        ("if side == REFUTED]:", "if set(sides) == {REFUTED}]:", "claims"),
        ("if sides.get(line.tokens) == {REFUTED}]", "if REFUTED in sides.get(line.tokens, ())]", "claims"),
    ],
    "reporting/subjects.py": [
        ("(delta.value, delta.high, delta.low)", "(delta.value, delta.low, delta.high)", "claims"),
    ],
    "evaluation/statistics.py": [
        ("(~np.isnan(nll)).sum(axis=1)", "np.full(len(nll), nll.shape[1])", "evaluation"),
    ],
    "evaluation/outcomes.py": [
        ("differences = sign * (", "differences = (", "harness::differences_of_other_numbers"),
        (
            "np.append(differences, [1, -1])", "differences",
            "harness::differences_of_hits_never_claim_certainty",
        ),
    ],
    "evaluation/quality.py": [
        ('row.kind in ("control", "twin")', 'row.kind in ("twin",)', "quality"),
        (
            "scores = read_scores(path, self.indices, self.precision, self.weights)", "scores = None",
            "quality resume::stopped_evaluation_keeps_its_whole_rows",
        ),
        ("removed(width) <= pairs.removed", "removed(width) < pairs.removed", "quality"),
    ],
    "evaluation/controls.py": [("shares=layer_shares", "shares=None", "quality")],
    "evaluation/perplexity.py": [
        ("positions >= batch", "positions > batch", "evaluation"),
        ("logits[:, begin:end].float()", "logits[:, begin:end]", "evaluation"),
    ],
    "evaluation/live_model.py": [
        (
            "mask[row, : len(tokens)] = 1", "mask[row] = 1",
            "harness::likelihoods_do_not_depend_on_the_batch",
        ),
        ("return tokens[-limit:]", "return tokens[:limit - 1]", "harness::truncation_is_an_error_unless_allowed"),
    ],
}  # fmt: skip


def node(test: str) -> str:
    """What pytest calls it."""
    file, _, name = test.partition("::")
    return f"test_{file}.py" + (f"::test_{name}" if name else "")


MUTANTS = [
    Mutant(file, old, new, tuple(map(node, tests.split())), *why)
    for file, faults in FAULTS.items()
    for old, new, tests, *why in faults
]
