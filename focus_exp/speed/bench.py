"""Speed benchmark: which clocks run at which lengths with which groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.errors import UserError, first_line
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.progress import ProgressBar
from focus_exp.results.measurement import Measurement
from focus_exp.speed.layer import Case, Layer, Methods, build_method, time_cases
from focus_exp.speed.model import model_shape, time_decode_model, time_prefill
from focus_exp.speed.timing import compare_times
from focus_exp.speed.workload import Groups, balanced
from focus_exp.training.precision import Precision

CPU_LENGTHS = tuple(1024 * 2**n for n in range(7))  # 1K to 64K
GPU_LENGTHS = (*CPU_LENGTHS, 256 * 1024, 1024 * 1024)
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
MODEL_REPEATS = 2  # of the whole model at most

Task = tuple[str, int, Callable[[int], Iterable[Measurement]]]  # clock, tokens, what measures it


@dataclass
class SpeedBenchmark:
    """Time the clocks of one run.

    Args:
        model: with a method attached.
        held_out: text that it was not trained on.
        is_trained: whether its routers were trained.
        methods: further methods, of which one layer is timed.
    """

    config: Config
    model: PreTrainedModel
    held_out: SequenceDataset
    precision: Precision
    is_trained: bool
    methods: Methods

    @cached_property
    def layer(self) -> Layer:
        """Return the attention layer that is timed, of the model's shape."""
        attention, settings = self.config.attention, self.config.bench
        backend = "auto" if attention.backend == "masked" else attention.backend
        device, local = self.precision.device, (attention.window, getattr(attention, "sinks", 0))
        graphs = settings.graphs and device.type == "cuda"
        shape, dtype = model_shape(self.model), DTYPES[settings.dtype]
        return Layer(shape, *local, dtype, device, backend, settings.repeats, graphs)

    def run(self) -> Iterator[Measurement]:
        """Yield all measurements, and print each speedup."""
        for clock, length, measure in ProgressBar(self.tasks(), desc="speed", unit="length"):
            for measurement in self.measure(clock, length, measure):
                print_speedup(measurement)
                yield measurement

    def tasks(self) -> list[Task]:
        """Return the clocks of one layer, of the whole model where its routers are trained, and of other methods."""
        settings, device = self.config.bench, self.precision.device
        lengths = settings.lengths or (GPU_LENGTHS if device.type == "cuda" else CPU_LENGTHS)
        tasks: list[Task] = [("attention", n, self.time_layer) for n in lengths]
        tasks += [("attention step", n, partial(self.time_layer, backward=True)) for n in settings.step_lengths]
        if self.is_trained:
            tasks += [("prefill", n, partial(self.time_model, time_prefill)) for n in settings.prefill_lengths]
            decode = partial(self.time_model, time_decode_model)
            tasks += [("decode model", n, decode) for n in settings.decode_lengths]
        elif settings.prefill_lengths or settings.decode_lengths:
            print("no trained router, so the whole model is not timed; give adapter= or train one")
        return tasks + [("methods", n, self.time_methods) for n in lengths if self.methods]

    def time_layer(self, length: int, backward: bool = False) -> Iterable[Measurement]:
        """Time one layer of the attached method."""
        clocks = ("attention step",) if backward else ("attention",)
        if self.config.attention.is_soft:
            groupings = self.groupings(length)
            cases = [Case.from_groups(self.layer, self.config.attention.method, groups) for groups in groupings]
            return time_cases(self.layer, length, cases, clocks if backward else (*clocks, "kernels"))
        (method, hidden), (name, settings) = self.fitted_layer, self.case
        case = Case(self.layer, name, settings | {"assignment": "trained"}, lambda: method)
        return time_cases(self.layer, length, [case], clocks, hidden)

    def time_model(self, measure: Callable[..., Iterable[Measurement]], length: int) -> Iterable[Measurement]:
        """Time the whole model on `length` tokens."""
        name, settings = self.case
        repeats = min(MODEL_REPEATS, self.config.bench.repeats)
        modes = self.config.bench.compile
        return measure(self.model, self.tokens(length), self.precision, repeats, name, modes, **settings)

    def time_methods(self, length: int) -> Iterable[Measurement]:
        """Time a layer of each of `methods`."""
        layer = self.layer
        cases = [
            Case(layer, name, {"method": name}, partial(build_method, layer, **x)) for name, x in self.methods.items()
        ]
        return time_cases(layer, length, cases)

    def measure(
        self, clock: str, length: int, measure: Callable[[int], Iterable[Measurement]]
    ) -> Iterable[Measurement]:
        """Return the measurements of a clock; a failure becomes one with its error."""
        try:
            return list(measure(length))
        except (RuntimeError, UserError) as error:  # such as a method without a KV cache
            settings = {"clock": clock, "seq_len": length, "error": f"{type(error).__name__}: {first_line(error)}"}
        name, case = self.case
        return compare_times(name, {}, {}, case | settings)

    @property
    def case(self) -> tuple[str, dict[str, Any]]:
        """Return name and settings of the attached method."""
        attention: Any = self.config.attention
        if not attention.is_soft:
            return attention.name, {"method": attention.name}
        settings = {"groups": attention.groups, **attention.routing, "window": attention.window}
        return attention.method, settings | {"assignment": "trained" if self.is_trained else "balanced"}

    def groupings(self, length: int) -> list[Groups]:
        """Return balanced groups of every K and those of the router, each at every top_k."""
        attention: Any = self.config.attention
        settings, groupings, rule = self.config.bench, list[Groups](), attention.pair_rule
        for top_k in settings.top_k:
            groupings += [balanced(k, length, top_k, rule) for k in settings.groups if top_k <= k]
            if self.is_trained and top_k <= attention.groups:
                groupings.append(Groups("trained", self.router_scores, top_k, rule))
        return groupings

    @cached_property
    def timed_layer(self) -> int:
        """Return the layer of median density on a sequence of held-out text."""
        densities: dict[int, float] = {}

        def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
            densities[layer] = method.count_pairs(selection, sequence).density

        with observe_selections(self.model, observe):
            self.read_held_out("density of the layers", 1)
        layer = sorted(densities, key=lambda i: densities[i])[len(densities) // 2]
        print(f"timed layer: {layer}, of median density")
        return layer

    @cached_property
    def router_scores(self) -> Tensor:
        """Return the assignment (1, n, K) of held-out tokens by the timed layer.

        Groups of a token depend on its own hidden state, so sequences of the evaluation's length are concatenated.
        """
        timed, scores = self.timed_layer, list[Tensor]()

        def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
            if layer == timed and selection.assignment is not None:
                scores.append(selection.assignment.cpu())

        with observe_selections(self.model, observe):
            self.read_held_out("groups of held-out text", self.config.bench.routed_tokens)
        return torch.cat(scores, 1)

    @cached_property
    def fitted_layer(self) -> tuple[AttentionMethod, Tensor]:
        """Return the timed layer, and its hidden states `(1, n, E)` on held-out tokens."""
        method, hidden = attached_methods(self.model)[self.timed_layer], list[Tensor]()

        def record(method: AttentionMethod, args: tuple[Any, ...]) -> None:
            if args[0] == "route":
                hidden.append(args[1].cpu())

        handle = method.register_forward_pre_hook(record)
        self.read_held_out("hidden states of held-out text", self.config.bench.routed_tokens)
        handle.remove()
        return method, torch.cat(hidden, 1)

    def read_held_out(self, description: str, tokens: int) -> None:
        """Run the model on sequences of held-out text, at least one, of so many tokens in all."""
        count = max(1, min(tokens // self.held_out.seq_len, len(self.held_out)))
        with torch.no_grad(), self.precision.context():
            for index in ProgressBar(range(count), desc=description, unit="sequence"):
                tokens_of_one = self.held_out[index]["input_ids"][None].to(self.precision.device)
                self.model(input_ids=tokens_of_one, use_cache=False, logits_to_keep=1)

    def tokens(self, length: int) -> Tensor:
        """Return held-out tokens (1, length), repeated where there are fewer."""
        count = min(len(self.held_out), -(-length // self.held_out.seq_len))
        tokens = torch.cat([self.held_out[i]["input_ids"] for i in range(count)])
        return tokens.repeat(-(-length // len(tokens)))[None, :length].to(self.precision.device)


def print_speedup(measurement: Measurement) -> None:
    if measurement.metric != "speedup":
        return
    at, name = measurement.settings, measurement.variant
    if "groups" in at:
        name = f"K={at['groups']} k={at['top_k']} {at['assignment']}"
    outcome = f"{measurement.value:.2f}x full attention ({at.get('path')})" if measurement.value else at.get("error")
    print(f"measured: {at['clock']:<14} {at['seq_len']:>9,} tokens, {name}: {outcome}")
