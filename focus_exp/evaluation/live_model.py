"""The model as lm-eval sees it: our batches, with padding masked, and a ledger of the requests."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from focus_exp.data import bos_of
from focus_exp.errors import UserError
from focus_exp.evaluation.ledger import Ledger
from focus_exp.models.hf_cache import cache_unsupported_reason
from focus_exp.models.methods import active_methods, pause_observers
from focus_exp.progress import ProgressBar
from focus_exp.training.precision import Precision

END_OF_TEXT = "<|endoftext|>"


class LiveModel(HFLM):
    """The model as it is now, attachment included. Padding is masked and distinct inputs run once, so that a score does
    not depend on the batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        precision: Precision,
        allow_truncation: bool = False,
    ) -> None:
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=unended(tokenizer),
            batch_size=batch_size,
            prefix_token_id=prefix_token(tokenizer),
        )
        self.precision = precision
        self.allow_truncation = allow_truncation
        self.label = ""
        self.ledger = Ledger()

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation given its context, and whether it is the greedy one."""
        askers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            askers[tuple(context + continuation)[:-1]].append(index)
        inputs = sorted(askers, key=len, reverse=True)
        fitted = [self.fitted(tokens, self.max_length) for tokens in inputs]
        self.ledger.lengths += map(len, fitted)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        begins = range(0, len(inputs), self.batch_size)
        for begin in ProgressBar(begins, desc=f"{self.label:<28}", unit="batch", disable=disable_tqdm):
            batch = slice(begin, begin + self.batch_size)
            asking = [askers[tokens] for tokens in inputs[batch]]
            counts = [max(len(requests[index][2]) for index in indices) for indices in asking]
            if max(counts) > self.max_length:
                raise UserError(
                    f"a continuation of {max(counts)} tokens exceeds the {self.max_length} that the model takes, and "
                    "would not be scored whole; leave the task out of eval.tasks"
                )
            for indices, logits in zip(asking, self.last_logits(fitted[batch], counts), strict=True):
                for index in indices:
                    answers[index] = likelihood(logits, requests[index][2])
        return answers

    def last_logits(self, inputs: list[tuple[int, ...]], counts: list[int]) -> list[Tensor]:
        """Float32 logits `[counts[i], V]` at the last positions of every input."""
        width = max(map(len, inputs))
        ids = torch.full((len(inputs), width), self.tokenizer.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        ends = [len(tokens) for tokens in inputs]
        last = width - min(end - count for end, count in zip(ends, counts, strict=True))
        with self.precision.context():
            logits = self.model(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                logits_to_keep=last,
                use_cache=False,
            ).logits[:, -last:]  # [B, last, V], also of a model that keeps all
        spans = [slice(end - count - width + last, end - width + last) for end, count in zip(ends, counts, strict=True)]
        return [of_row[span].float() for of_row, span in zip(logits, spans, strict=True)]

    def fitted(self, tokens: tuple[int, ...], limit: int) -> tuple[int, ...]:
        """The last `limit` tokens; UserError if that is not all of them and truncation is not allowed."""
        if len(tokens) <= limit:
            return tokens
        if not self.allow_truncation:
            raise UserError(
                f"a request of {len(tokens)} tokens exceeds the {limit} that fit and would have to be cut; "
                "set eval.allow_truncation=true to allow it, or leave the task out of eval.tasks"
            )
        self.ledger.truncated += 1
        return tokens[-limit:]

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Prompts of a generation, padded on the left."""
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        width = max(len(self.fitted(tuple(row), left_truncate_len or len(row))) for row in map(unpadded, ids, mask))
        return ids[:, -width:], mask[:, -width:]

    @torch.no_grad()
    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **options: Any
    ) -> Tensor:
        """Greedy unless the task says otherwise; with a key/value cache where what is attached has one."""
        if not options.setdefault("do_sample", False):
            options.pop("temperature", None)
        with pause_observers(self.model), self.precision.context():
            found: Tensor = self.model.generate(
                input_ids=context,
                attention_mask=attention_mask,
                max_length=max_length,
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=cache_unsupported_reason(active_methods(self.model).values()) is None,
                **options,
            )
        prompts, rows = map(unpadded, context, attention_mask), found[:, context.shape[1] :].tolist()
        read = [(*prompt, *self.read_again(row, stop)) for prompt, row in zip(prompts, rows, strict=True)]
        self.ledger.lengths += map(len, read)
        if active_methods(self.model):
            self.last_logits(read, [1] * len(read))
        return found

    def read_again(self, tokens: list[int], stop: list[str]) -> list[int]:
        """Those before the one that ended a continuation; what other rows of its batch wrote after that is cut off."""
        ends = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
        for index, token in enumerate(tokens):
            text = self.tokenizer.decode(tokens[: index + 1])
            if token in ends or any(end in text for end in stop):
                return tokens[:index]
        return tokens[:-1]


def likelihood(logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Log-probability of `continuation` under the last of the logits `[n, V]`, and whether it is the greedy one."""
    tokens = torch.tensor(continuation, device=logits.device)
    logits = logits[-len(tokens) :]
    total = logits.log_softmax(-1).gather(1, tokens[:, None]).sum()
    if not torch.isfinite(total):
        raise RuntimeError("a log-likelihood is not finite")
    return total.item(), bool((logits.argmax(-1) == tokens).all())


def unended(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy, which lm-eval gives a padding token; it puts nothing behind a prompt, where the answer follows."""
    tokenizer, first = copy.deepcopy(tokenizer), bos_of(tokenizer)
    plain, full = (list(tokenizer("probe", add_special_tokens=added)["input_ids"]) for added in (False, True))
    if full[-len(plain) :] != plain:
        begin = [] if first is None else [(str(tokenizer.convert_ids_to_tokens(first)), first)]
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            template = TemplateProcessing(single=[*(token for token, _ in begin), "$A"], special_tokens=begin)
            tokenizer.backend_tokenizer.post_processor = template
        else:  # written in Python, such as ByT5's
            ids = [token for _, token in begin]
            tokenizer.build_inputs_with_special_tokens = lambda tokens, pair=None: [*ids, *tokens, *(pair or [])]
    return tokenizer


def unpadded(ids: Tensor, mask: Tensor) -> list[int]:
    return ids[mask.bool()].tolist()


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What stands before a text without context: the tokenizer's own first token, or what ends the text before it."""
    first = bos_of(tokenizer)
    return tokenizer.get_vocab().get(END_OF_TEXT, tokenizer.eos_token_id) if first is None else first
