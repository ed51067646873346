"""Continuations of held-out prompts, scored by the base model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.errors import UserError, first_line
from focus_exp.evaluation.variants import BASE
from focus_exp.models.cache_size import count_keys_and_bytes
from focus_exp.models.methods import disable_method, set_routing, temporary_attributes
from focus_exp.progress import ProgressBar
from focus_exp.results.measurement import Measurement, hard_variant
from focus_exp.training.precision import Precision


@dataclass(kw_only=True)
class Continuation:
    """Continuation of a held-out prompt by one variant, or by the text itself.

    Args:
        base_nll: nats per token under the base model with full attention, given the prompt.
        repetition: fraction of its runs of four tokens that repeat an earlier one (seq-rep-4, Welleck et al. 2020).
        agreeing: tokens from the start that are those of full attention.
        keys_read: by a layer in the last step.
        cache_bytes: of keys and values at the end, in all layers.
    """

    variant: str
    prompt: int
    prompt_text: str
    text: str
    prompt_tokens: int
    tokens: int
    kind: Literal["text", "base", "hard"]
    top_k: int | None = None
    base_nll: float | None = None
    repetition: float | None = None
    agreeing: int | None = None
    seconds: float | None = None
    keys_read: float | None = None
    cache_bytes: int | None = None
    error: str | None = None

    def measurements(self) -> Iterator[Measurement]:
        settings = {key: getattr(self, key) for key in ("prompt", "prompt_tokens", "kind", "top_k", "error")}
        for metric, value, unit in (
            ("generated_tokens", self.tokens, "tokens"),
            ("continuation_nll", self.base_nll, "nats"),
            ("repetition", self.repetition, "fraction"),
            ("agreeing_tokens", self.agreeing, "tokens"),
            ("generation_seconds", self.seconds, "s"),
            ("keys_read", self.keys_read, "tokens"),
            ("cache_bytes", self.cache_bytes, "bytes"),
        ):
            if value is not None:
                yield Measurement(variant=self.variant, metric=metric, value=value, unit=unit, settings=settings)


@dataclass
class Generation:
    """Generate continuations of the starts of held-out sequences.

    Args:
        model: with a trained router attached.
        blocks: held-out sequences, whose starts are the prompts.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: SequenceDataset
    config: Config
    precision: Precision

    def __post_init__(self) -> None:
        count = min(self.config.generate.prompts, len(self.blocks))
        between = dict.fromkeys(int(i) for i in np.linspace(0, len(self.blocks) - 1, count + 2)[1:-1].round())
        self.indices = [*between] if len(between) == count else self.blocks.select_evenly(count)
        self.greedy: dict[int, list[int]] = {}  # tokens under full attention

    def rows(self) -> Iterator[Continuation]:
        """Yield the text's own continuation of each prompt, then generated ones."""
        settings = self.config.generate
        with ProgressBar(total=len(self.indices) * (1 + len(self.hard)), desc="continuations", unit="prompt") as bar:
            for number, index in enumerate(self.indices):
                tokens = self.blocks[index]["input_ids"]
                prompt, rest = tokens[: settings.prompt_tokens], tokens[settings.prompt_tokens :]
                yield self.make_row(number, prompt, rest[: settings.new_tokens].tolist(), "text", "text")
                for name in (BASE, *self.hard):
                    yield self.generate(number, prompt, name)
                    bar.update()

    @cached_property
    def hard(self) -> dict[str, dict[str, Any]]:
        """Return what `set_routing` is given, by variant."""
        attention, top_ks = self.config.attention, self.config.generate.top_k
        routings = attention.routings(top_ks)
        if attention.is_soft:
            return {hard_variant(attention.method, **routing): routing for routing in routings}
        return {f"{attention.name} k={x['top_k']}" if top_ks and x else attention.name: x for x in routings}

    @torch.no_grad()
    def generate(self, number: int, prompt: Tensor, name: str) -> Continuation:
        """Return a continuation; a failure becomes the row's error."""
        kind, routing = ("base", {}) if name == BASE else ("hard", self.hard[name])
        if kind == "hard":
            set_routing(self.model, hard=True, **routing)
        settings, model = self.config.generate, self.model
        # a model's own could penalize repetitions, unrecorded
        plain = temporary_attributes([model], generation_config=GenerationConfig())
        start = time.perf_counter()
        try:
            with plain, disable_method(model) if kind == "base" else nullcontext(), self.precision.context():
                ids = prompt[None].to(model.device)
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": True}
                greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
                room = {"max_new_tokens": settings.new_tokens, "return_dict_in_generate": True}
                output: Any = model.generate(**inputs, **greedy, **room)  # type: ignore[operator]
        except (RuntimeError, UserError) as error:
            row = self.make_row(number, prompt, [], name, kind)
            row.error = f"{type(error).__name__}: {first_line(error)}"
            return row
        seconds = time.perf_counter() - start
        new = output.sequences[0, len(prompt) :].tolist()
        row = self.make_row(number, prompt, new, name, kind)
        row.top_k, row.seconds = routing.get("top_k"), seconds
        row.keys_read, row.cache_bytes = measure_cache(output.past_key_values)
        if kind == "base":
            self.greedy[number] = new
        elif full := self.greedy.get(number):  # none where full attention failed
            row.agreeing = int(np.cumprod(np.equal(new, full)).sum())  # before the first that differs
        return row

    def make_row(self, number: int, prompt: Tensor, new: list[int], name: str, kind: Any) -> Continuation:
        given: dict[str, Any] = {"prompt_tokens": len(prompt), "prompt_text": self.decode(prompt.tolist())}
        made: dict[str, Any] = {"tokens": len(new), "text": self.decode(new), "repetition": repetition(new)}
        loss = self.base_nll(prompt, torch.tensor(new)) if new else None
        return Continuation(variant=name, kind=kind, prompt=number, base_nll=loss, **given, **made)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    @torch.no_grad()
    def base_nll(self, prompt: Tensor, new: Tensor) -> float:
        """Return nats per token of `new` after `prompt` under full attention."""
        tokens = torch.cat([prompt, new])[None].to(self.model.device)
        with disable_method(self.model), self.precision.context():
            logits = self.model(input_ids=tokens, use_cache=False, logits_to_keep=len(new) + 1).logits[0, :-1]
        return float(F.cross_entropy(logits.float(), tokens[0, -len(new) :]))


def repetition(tokens: list[int], size: int = 4) -> float | None:
    """Return the fraction of runs of `size` tokens that repeat an earlier one; None of fewer tokens."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else None


def measure_cache(cache: Any) -> tuple[float | None, int | None]:
    """Return the keys that the last step read per layer, and the cache's bytes."""
    if isinstance(cache, DynamicCache):
        layers = [count_keys_and_bytes(x) for x in cache.layers if isinstance(x, DynamicLayer) and x.get_seq_length()]
        return float(mean(read for read, _ in layers)), sum(size for _, size in layers)
    return None, None
