"""Which clocks run at which lengths, with which groups; each measurement is kept as soon as it is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.focus import Focus
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.config import Config
from focus_exp.data import Blocks
from focus_exp.errors import first_line
from focus_exp.models.methods import observe_selections
from focus_exp.progress import ProgressBar
from focus_exp.results.environment import commit, cpu_name
from focus_exp.results.measurement import Measurement
from focus_exp.speed.decode import decode_model_row, decode_rows
from focus_exp.speed.layer import Layer, attention_rows, attention_step_rows
from focus_exp.speed.methods import Methods, method_rows
from focus_exp.speed.model import attention_dtype, method_prefill_row, model_step_row, prefill_row, shape_of
from focus_exp.speed.timing import compare_times, device_name
from focus_exp.speed.workload import Groups, balanced
from focus_exp.storage import replace_file
from focus_exp.training.precision import Precision

KILO = 1024
ON_CPU = tuple(KILO * 2**n for n in range(7))  # 1K to 64K
ON_GPU = (*ON_CPU, 256 * KILO, 1024 * KILO)
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
PREFILL_REPEATS = 2
MODEL_REPEATS = 3

Task = tuple[str, int, Callable[[], Iterable[Measurement]]]


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

    def rows(self) -> Iterator[Measurement]:
        """Yield the measurements of Focus, shortest sequences first; prints each timing."""
        tasks = self.tasks()
        for clock, length, measure in ProgressBar(tasks, desc="speed", unit="length"):
            failed = partial(self.failed, clock, length)
            for measurement in self.kept(f"{clock.replace(' ', '_')}-{length}", measure, failed):
                say(measurement)
                yield measurement

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
                print("no trained router: the whole model is not timed; give adapter= or a recipe that trains one")
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

    def method_rows(self) -> Iterator[Measurement]:
        """Yield a layer of each of `methods` at every length, and the prefill where another method is attached."""
        prefills = [] if self.config.has_router else self.settings.prefill_lengths
        layers = [
            partial(self.keep, f"methods-{n}", partial(self.layers, n)) for n in (self.lengths if self.methods else [])
        ]
        wholes = [
            partial(
                self.kept, f"methods_prefill-{n}", partial(self.method_prefill, n),
                partial(self.method_failed, n),
            )
            for n in prefills
        ]  # fmt: skip
        for measured in ProgressBar([*layers, *wholes], desc="methods", unit="length"):
            for measurement in measured():
                say(measurement)
                yield measurement

    def layers(self, length: int) -> Iterable[Measurement]:
        return method_rows(self.layer, length, self.methods)

    def method_prefill(self, length: int) -> Iterable[Measurement]:
        name, repeats = self.config.attention.name, min(PREFILL_REPEATS, self.settings.repeats)
        return method_prefill_row(name, self.model, self.text(length), self.precision, repeats)

    def attention(self, length: int) -> Iterable[Measurement]:
        return attention_rows(self.layer, length, self.groupings(length))

    def attention_step(self, length: int) -> Iterable[Measurement]:
        return attention_step_rows(self.layer, length, self.groupings(length))

    def prefill(self, length: int) -> Iterable[Measurement]:
        return prefill_row(self.model, self.text(length), self.precision, min(PREFILL_REPEATS, self.settings.repeats))

    def model_step(self, length: int) -> Iterable[Measurement]:
        return model_step_row(self.model, self.text(length), self.precision)

    def decode(self, length: int) -> Iterable[Measurement]:
        layer = replace(self.layer, dtype=attention_dtype(self.model, self.precision))
        return decode_rows(layer, length, self.groupings(length))

    def decode_model(self, length: int) -> Iterable[Measurement]:
        tokens = self.text(length)
        return decode_model_row(self.model, tokens, self.precision, min(MODEL_REPEATS, self.settings.repeats))

    @property
    def positions(self) -> int:
        """Tokens that the model has positions for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def failed(self, clock: str, length: int, reason: str) -> list[Measurement]:
        focus = self.config.focus
        settings = {
            "clock": clock, "seq_len": length, "groups": focus.groups, "assignment": "balanced", "top_k": 1,
            "pair_rule": focus.pair_rule, "window": focus.window, "error": reason,
        }  # fmt: skip
        return compare_times("focus", {}, {}, settings)

    def method_failed(self, length: int, reason: str) -> list[Measurement]:
        name = self.config.attention.name
        return compare_times(name, {}, {}, {"clock": "prefill", "method": name, "seq_len": length, "error": reason})

    def kept(
        self, name: str, measure: Callable[[], Iterable[Measurement]], failed: Callable[[str], list[Measurement]]
    ) -> list[Measurement]:
        """Return the measurements of one clock and length; a failure is one too, and is repeated by the next run."""
        try:
            return self.keep(name, measure)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            return failed(f"{type(error).__name__}: {first_line(error)}")

    def keep(self, name: str, measure: Callable[[], Iterable[Measurement]]) -> list[Measurement]:
        """Read what was measured under the same circumstances before an interruption, or measure and write it."""
        path = self.folder / "speed" / f"{name}.json"
        now = circumstances(self.precision.device)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if {key: found[key] for key in now} == now:
                return [Measurement(**values) for values in found["measurements"]]
        except (OSError, ValueError, TypeError, KeyError):
            pass
        measurements = list(measure())
        replace_file(path, json.dumps({**now, "measurements": [vars(m) for m in measurements]}).encode())
        return measurements

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
        count = max(1, min(self.settings.routed_tokens // self.held_out.seq_len, len(self.held_out)))
        found: dict[int, list[Tensor]] = {}

        def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
            if isinstance(method, Focus) and selection.assignment is not None:
                found.setdefault(layer, []).append(selection.assignment[0].cpu())

        with observe_selections(self.model, observe), self.precision.context():
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
        windows = [self.held_out[i]["input_ids"] for i in range(-(-length // self.held_out.seq_len))]
        return torch.cat(windows)[None, :length].to(self.precision.device)


def circumstances(device: torch.device) -> dict[str, str | None]:
    """What seconds hang on beside the work itself: those of one table are of one of each."""
    return {"device": device_name(device), "processor": cpu_name(), "torch": torch.__version__, "commit": commit()}


def say(measurement: Measurement) -> None:
    """Print a speedup; other measurements are left to the tables."""
    if measurement.metric != "speedup":
        return
    at, name = measurement.settings, measurement.variant
    if "groups" in at:
        name = f"K={at['groups']} k={at['top_k']} {at['assignment']}"
    outcome = f"{measurement.value:.2f}x full attention ({at.get('path')})" if measurement.value else at.get("error")
    print(f"measured: {at['clock']:<14} {at['seq_len']:>9,} tokens, {name}: {outcome}")
