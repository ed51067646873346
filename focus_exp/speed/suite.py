"""Which clocks run at which lengths, with which groups; each measurement is kept as soon as it is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.focus import Focus
from focus_exp.attention.method import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.config import Config
from focus_exp.data import Blocks
from focus_exp.errors import first_line
from focus_exp.models.attached import observed
from focus_exp.progress import ProgressBar
from focus_exp.records.speed import Clock, MethodSpeedRow, SpeedRow
from focus_exp.results.environment import commit, cpu_name
from focus_exp.speed.decode import decode_model_row, decode_rows
from focus_exp.speed.layer import Layer, attention_rows, attention_step_rows
from focus_exp.speed.methods import Methods, method_rows
from focus_exp.speed.model import attention_dtype, method_prefill_row, model_step_row, prefill_row, shape_of
from focus_exp.speed.timing import device_name
from focus_exp.speed.workload import Groups, balanced
from focus_exp.storage import replace_file
from focus_exp.training.precision import Precision

KILO = 1024
ON_CPU = tuple(KILO * 2**n for n in range(7))  # 1K to 64K
ON_GPU = (*ON_CPU, 256 * KILO, 1024 * KILO)
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
PREFILL_REPEATS = 2
MODEL_REPEATS = 3

Timed = TypeVar("Timed", SpeedRow, MethodSpeedRow)
Task = tuple[Clock, int, Callable[[], Iterable[SpeedRow]]]


class Suite:
    """The clocks of one run; what is measured is kept in its folder, so that an interrupted run goes on from there."""

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        held_out: Blocks,
        precision: Precision,
        folder: Path,
        trained: bool,
        methods: Methods,
    ) -> None:
        """`model` is attached, `held_out` text it was not trained on, `trained` says whether its routers were,
        `methods` are others to time a layer of."""
        self.config, self.settings, self.model, self.held_out = config, config.bench, model, held_out
        self.precision, self.folder, self.trained, self.methods = precision, folder, trained, methods
        self.scores: Tensor | None = None

    @cached_property
    def layer(self) -> Layer:
        """The attention layer that is timed, of the model's shape."""
        attention = self.config.focus
        return Layer(
            shape_of(self.model), attention.window, attention.sinks, DTYPES[self.settings.dtype],
            self.precision.device, "auto" if attention.backend == "masked" else attention.backend,
            self.settings.repeats,
        )  # fmt: skip

    def rows(self) -> Iterator[SpeedRow]:
        """All rows, each printed as it comes; shortest first, what takes longest last."""
        tasks = self.tasks()
        for clock, length, measure in ProgressBar(tasks, desc="speed", unit="length"):
            failed = partial(self.failed, clock, length)
            for row in self.kept(f"{clock.replace(' ', '_')}-{length}", SpeedRow, measure, failed):
                say(row)
                yield row

    def tasks(self) -> list[Task]:
        """The clocks of Focus; none where another method is attached."""
        if not self.config.has_router:
            return []
        steps, prefills = self.settings.step_lengths, self.settings.prefill_lengths
        decodes = self.settings.decode_lengths
        layer: list[Task] = [
            *(("attention", n, partial(self.attention, n)) for n in self.lengths),
            *(("attention step", n, partial(self.attention_step, n)) for n in steps),
            *(("decode", n, partial(self.decode, n)) for n in decodes),
        ]
        if not self.trained:
            if steps or prefills or decodes:
                print("no trained router: the whole model is not timed; give adapter= or a regime that trains one")
            return layer
        return [
            *layer,
            *(("prefill", n, partial(self.prefill, n)) for n in prefills),
            *(("decode model", n, partial(self.decode_model, n)) for n in decodes if n <= self.positions),
            *(("model step", n, partial(self.model_step, n)) for n in steps),
        ]

    @property
    def lengths(self) -> Iterable[int]:
        """Tokens of one layer."""
        return self.settings.lengths or (ON_GPU if self.precision.device.type == "cuda" else ON_CPU)

    def method_rows(self) -> Iterator[MethodSpeedRow]:
        """A layer of each of `methods` at every length, and the whole model where what is attached is not Focus, each
        printed as it comes."""
        prefills = [] if self.config.has_router else self.settings.prefill_lengths
        layers = [
            partial(self.keep, f"methods-{n}", MethodSpeedRow, partial(self.layers, n))
            for n in (self.lengths if self.methods else [])
        ]
        wholes = [
            partial(
                self.kept, f"methods_prefill-{n}", MethodSpeedRow, partial(self.method_prefill, n),
                partial(self.method_failed, n),
            )
            for n in prefills
        ]  # fmt: skip
        for measured in ProgressBar([*layers, *wholes], desc="methods", unit="length"):
            for row in measured():
                print(
                    f"measured: {row.clock:<14} {row.tokens:>9,} tokens, {row.method}: "
                    + (f"{row.ratio:.2f}x full attention ({row.path})" if row.ratio else f"failed: {row.error}")
                )
                yield row

    def layers(self, length: int) -> Iterable[MethodSpeedRow]:
        return method_rows(self.layer, length, self.methods)

    def method_prefill(self, length: int) -> Iterable[MethodSpeedRow]:
        name, repeats = self.config.attention.name, min(PREFILL_REPEATS, self.settings.repeats)
        return [method_prefill_row(name, self.model, self.text(length), self.precision, repeats)]

    def attention(self, length: int) -> Iterable[SpeedRow]:
        return attention_rows(self.layer, length, self.groupings(length))

    def attention_step(self, length: int) -> Iterable[SpeedRow]:
        return attention_step_rows(self.layer, length, self.groupings(length))

    def prefill(self, length: int) -> Iterable[SpeedRow]:
        return [prefill_row(self.model, self.text(length), self.precision, min(PREFILL_REPEATS, self.settings.repeats))]

    def model_step(self, length: int) -> Iterable[SpeedRow]:
        return [model_step_row(self.model, self.text(length), self.precision)]

    def decode(self, length: int) -> Iterable[SpeedRow]:
        layer = replace(self.layer, dtype=attention_dtype(self.model, self.precision))
        return decode_rows(layer, length, self.groupings(length))

    def decode_model(self, length: int) -> Iterable[SpeedRow]:
        tokens = self.text(length)
        return [decode_model_row(self.model, tokens, self.precision, min(MODEL_REPEATS, self.settings.repeats))]

    @property
    def positions(self) -> int:
        """Tokens that the model has positions for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def failed(self, clock: Clock, length: int, reason: str) -> SpeedRow:
        groups = self.config.focus.groups
        return SpeedRow(clock=clock, tokens=length, groups=groups, assignment="balanced", error=reason)

    def method_failed(self, length: int, reason: str) -> MethodSpeedRow:
        name = self.config.attention.name
        return MethodSpeedRow(clock="prefill", method=name, tokens=length, layer="", dtype="", error=reason)

    def kept(
        self, name: str, kind: type[Timed], measure: Callable[[], Iterable[Timed]], failed: Callable[[str], Timed]
    ) -> list[Timed]:
        """What one clock says of a length; a failure is a row too, and is tried again by the next run."""
        try:
            return self.keep(name, kind, measure)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            return [failed(f"{type(error).__name__}: {first_line(error)}")]

    def keep(self, name: str, kind: type[Timed], measure: Callable[[], Iterable[Timed]]) -> list[Timed]:
        """What was measured under the same circumstances before the run was interrupted, or what is measured now."""
        path = self.folder / "speed" / f"{name}.json"
        now = circumstances(self.precision.device)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if {key: found[key] for key in now} == now:
                return [kind(**row) for row in found["rows"]]
        except (OSError, ValueError, TypeError, KeyError):
            pass
        rows = list(measure())
        replace_file(path, json.dumps({**now, "rows": [asdict(row) for row in rows]}).encode())
        return rows

    def groupings(self, length: int) -> list[Groups]:
        """Balanced groups of every K, those of the router, each at every k."""
        attention, found = self.config.focus, []
        for top_k in self.settings.top_k:
            found += [balanced(k, length, top_k, attention.pair_rule) for k in self.settings.groups if top_k <= k]
            if self.trained and top_k <= attention.groups:
                found.append(Groups("trained", self.router_scores(), top_k, attention.pair_rule))
        return found

    @torch.no_grad()
    def router_scores(self) -> Tensor:
        """Assignment `[1, n, K]` of held-out tokens by the layer whose groups are of median evenness.

        Groups of a token depend on its own hidden state, so windows of the evaluation's length stand side by side.
        """
        if self.scores is not None:
            return self.scores
        count = max(1, min(self.settings.routed_tokens // self.held_out.block_size, len(self.held_out)))
        found: dict[int, list[Tensor]] = {}

        def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
            if isinstance(method, Focus) and selection.assignment is not None:
                found.setdefault(layer, []).append(selection.assignment[0].cpu())

        with observed(self.model, observe), self.precision.context():
            for index in ProgressBar(range(count), desc="groups of held-out text", unit="window"):
                tokens = self.held_out[index]["input_ids"][None].to(self.precision.device)
                self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        scores = {layer: torch.cat(parts) for layer, parts in found.items()}
        # work in same-group attention goes with the sum of squared shares
        work = {
            i: float((s.argmax(-1).bincount(minlength=s.shape[-1]) / len(s)).square().sum()) for i, s in scores.items()
        }
        layer = sorted(work, key=lambda i: work[i])[len(work) // 2]
        print(f"trained groups: those of layer {layer}, of median evenness, on {len(scores[layer]):,} held-out tokens")
        self.scores = scores[layer][None]
        return self.scores

    def text(self, length: int) -> Tensor:
        """`[1, length]` held-out tokens."""
        windows = [self.held_out[i]["input_ids"] for i in range(-(-length // self.held_out.block_size))]
        return torch.cat(windows)[None, :length].to(self.precision.device)


def circumstances(device: torch.device) -> dict[str, str | None]:
    """What seconds hang on beside the work itself: those of one table are of one of each."""
    return {"device": device_name(device), "processor": cpu_name(), "torch": torch.__version__, "commit": commit()}


def say(row: SpeedRow) -> None:
    what = f"measured: {row.clock:<14} {row.tokens:>9,} tokens, K={row.groups} k={row.top_k} {row.assignment}"
    if row.error is not None or row.full_seconds is None or row.focus_seconds is None or row.ratio is None:
        print(f"{what}: failed: {row.error}")
        return
    bound = f" of at most {row.bound:.2f}" if row.bound and row.clock in ("kernels", "attention", "decode") else ""
    print(
        f"{what}: full {row.full_seconds:.4g} s, Focus {row.focus_seconds:.4g} s, {row.ratio:.2f}x{bound} ({row.path})"
    )
