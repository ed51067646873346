"""Focus: sparse attention by learned token groups, attached to a frozen Hugging Face language model.

    model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
    fit(model, texts, density=0.2)                  # two encoders, fitted to the frozen model
    save_adapter(model, "my-adapter")               # safetensors and JSON
    load_adapter(detach(model), "my-adapter")       # a folder or a Hub repository; refuses another base model

    attach(detach(model), "focus", groups=4, window=128)  # Focus made causal
    freeze(model, "router")                         # then train in your own loop, with
    update_balance(model)                           # after each optimizer step
    set_routing(model.eval(), hard=True, top_k=1)   # hard routing; a router in training routes softly
    with disable_method(model): ...                 # the base model, bit for bit
    push_to_hub("my-adapter", "me/focus-gpt2")

`attach` first compares the logits of two short texts with those of the base model, with every QK pair kept, and
refuses models where they differ. For `generate()` see `models.hf_cache`.

In training mode a router whose parameters require gradients routes softly; a frozen one routes as in eval mode.
`save_pretrained` and checkpoints of PEFT do not restore the method: save routers with `save_adapter`.

attention   routing, selection, reference implementation, sparse path and kernels, KV cache, baselines
models      load, attach, self-check, KV cache in transformers, adapters
data        corpora, tokenization, packing, resumable order
training    Lightning module, phases, callbacks, several processes
fitting     each layer alone to the frozen base: warm start and balance, two encoders, baselines
evaluation  perplexity with intervals, lm-eval, pruned pairs, groups
speed       layer, prefill, training step and decode
results     measurements, losses and record of a run; never imports torch
reporting   aggregation, claims, tables, figures, report, W&B; never imports torch
runs        compose the configuration, open a run, resume it, load model and text
jobs        what job= runs
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from focus_exp.errors import UserError
    from focus_exp.fitting.fit import fit
    from focus_exp.models.adapter import load_adapter, push_to_hub, save_adapter
    from focus_exp.models.attach import attach, detach
    from focus_exp.models.methods import disable_method, freeze, is_causal, set_routing, update_balance

__version__ = "0.1.0"

# imported on first use, so that reading records does not load torch
_MODULES = {
    "UserError": "focus_exp.errors",
    "load_adapter": "focus_exp.models.adapter",
    "push_to_hub": "focus_exp.models.adapter",
    "save_adapter": "focus_exp.models.adapter",
    "attach": "focus_exp.models.attach",
    "detach": "focus_exp.models.attach",
    "disable_method": "focus_exp.models.methods",
    "fit": "focus_exp.fitting.fit",
    "freeze": "focus_exp.models.methods",
    "is_causal": "focus_exp.models.methods",
    "set_routing": "focus_exp.models.methods",
    "update_balance": "focus_exp.models.methods",
}
__all__ = ["UserError", "attach", "detach", "disable_method", "fit", "freeze", "is_causal"]
__all__ += ["load_adapter", "push_to_hub", "save_adapter", "set_routing", "update_balance"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'focus_exp' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
