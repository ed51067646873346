"""Time whole models on a CUDA device: python tests/gpu_models.py [--out FOLDER] [--minutes 30].

Prefill of a prompt and a decode step behind it (static cache), base and Focus in turn, eager, compiled, and compiled
with CUDA graphs (mode="reduce-overhead"). Random weights; two encoders and the key gate keep a fifth of the distant
pairs. Ends in FOLDER/models.json. --tiny runs everything at toy sizes, without a device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conftest import build
from gpu_clock import DUAL, GATE, KILO, PUBLISHED, make_method
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from focus_exp import attach, disable_method
from focus_exp.attention.base import AttentionMethod
from focus_exp.errors import first_line
from focus_exp.models.methods import attached_methods, swap_methods
from focus_exp.results.environment import commit
from focus_exp.speed.model import run_in
from focus_exp.speed.timing import Work, device_name, time_in_turns

MODELS = {"smollm2_135m": (4, 8, 16, 32, 64, 128), "mistral_7b": (4, 8, 16, 32, 64, 128)}  # K tokens of a prompt
FORMS = ((PUBLISHED, 8), (DUAL, 8), (DUAL, 16), (GATE, 1))
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None, "compiled": {"dynamic": False}, "graphed": {"dynamic": False, "mode": "reduce-overhead"},
}  # fmt: skip
TINY: dict[str, dict[str, Any] | None] = {"eager": None, "compiled": {"backend": "eager"}}
REPEATS = 5
ROOM = 64  # of a static cache behind the prompt
torch._dynamo.config.cache_size_limit = 64  # one graph for each form


def make_forms(model: PreTrainedModel) -> dict[str, dict[int, AttentionMethod]]:
    """Return the methods of all layers by form."""
    layers = {index: method.shape for index, method in attached_methods(model).items()}
    return {
        f"{form}, K = {groups}": {i: make_method(form, groups, x, model.device) for i, x in layers.items()}
        for form, groups in FORMS
    }


def prefill(call: Callable[..., Any], tokens: Tensor) -> None:
    call(input_ids=tokens, use_cache=False, logits_to_keep=1)


def fill(model: PreTrainedModel, tokens: Tensor) -> StaticCache:
    """Return a static cache that holds `tokens` (1, T)."""
    cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + ROOM)
    model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
    return cache


def step(call: Callable[..., Any], token: Tensor, cache: StaticCache) -> None:
    call(input_ids=token, past_key_values=cache, logits_to_keep=1)


def measure(model: PreTrainedModel, length: int, options: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the times of prefill and of a decode step of all forms and of the base.

    options: of torch.compile; None for eager.
    """
    torch._dynamo.reset()
    forms = make_forms(model)
    call: Callable[..., Any] = model if options is None else torch.compile(model, fullgraph=True, **options)
    tokens = torch.randint(model.config.vocab_size, (1, length), device=model.device)
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {"base": partial(disable_method, model)}
    contexts |= {name: partial(swap_methods, model, methods) for name, methods in forms.items()}

    def make_step(context: Callable[[], AbstractContextManager[object]]) -> Work:
        with context():
            return partial(step, call, tokens[:, :1], fill(model, tokens))

    clocks = {"prefill": lambda _: partial(prefill, call, tokens), "decode": make_step}
    for clock, make in clocks.items():
        works: dict[str, Work] = {}
        for name, context in contexts.items():
            try:
                works[name] = partial(run_in, context, make(context))
                works[name]()  # compiles
            except Exception as error:  # out of memory, or a form that is not served: the others are timed
                works.pop(name, None)
                yield {"clock": clock, "form": name, "error": first_line(error)[:300]}
        seconds = time_in_turns(works, REPEATS, model.device)
        for name, value in seconds.items():
            yield {"clock": clock, "form": name, "seconds": value, "of base": seconds.get("base", value) / value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {"tiny_llama": (1 / 16,)} if options.tiny else MODELS
    until, rows = time.monotonic() + 60 * options.minutes, []
    dtype = torch.float32 if options.tiny else torch.bfloat16
    for name, lengths in models.items():
        with device:
            positions = {"max_position_embeddings": int(max(lengths) * KILO) + 2 * ROOM}
            model = attach(build(name, dtype, **positions).eval(), "focus", groups=2)
        for length in lengths:
            for mode, compiled in (TINY if options.tiny else MODES).items():
                if time.monotonic() > until:
                    print("out of time", flush=True)
                    break
                with torch.no_grad():
                    for row in measure(model, int(length * KILO), compiled):
                        rows.append({"model": name, "tokens": int(length * KILO), "mode": mode} | row)
                        print(json.dumps(rows[-1]), flush=True)
        del model
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {"device": device_name(device), "torch": torch.__version__, "commit": commit(), "rows": rows}
    (options.out / "models.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
