"""Focus: learned sparse attention attached to a frozen Hugging Face language model.

    model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
    attach(model, "focus", groups=4, window=128)
    freeze(model, "router")                        # train the rest in your own loop
    set_routing(model.eval(), hard=True, top_k=1)  # sparse attention; in training mode routing is soft
    with disable_method(model): ...                # the base model, bit for bit
    save_adapter(model, "my-adapter")              # safetensors and JSON
    push_to_hub("my-adapter", "me/focus-gpt2")     # the adapter of a run includes a model card
    load_adapter(detach(model), "me/focus-gpt2")   # or a directory; another base model is refused

`attach` runs two short texts through the model with every pair kept, and refuses the model unless the logits are those
of the base. See `models.hf_cache` for `generate()`.

In training mode routing is soft and the balancing biases of routers move, frozen or not. To keep trained routers in
hard routing under PEFT or a Trainer, which call `model.train()`:

    from focus_exp.models.methods import attached_methods
    for method in attached_methods(model).values(): method.eval().train = lambda mode=True: None

Checkpoints of a Trainer with a PEFT model hold only PEFT's parameters: save routers that are trained with LoRA by
`save_adapter`, and load them before resuming. `save_pretrained` keeps the routers' parameters but not the method: use
`save_adapter`, or attach with the same options and load the state dict.

attention   methods on tensors: routing, selection, reference and sparse implementations, KV cache, baselines
models      load, attach, self-check, transformers hooks, adapters
data        corpora, tokenization, packing, resumable order
training    Lightning module, phases, warm start, layer-wise fits, callbacks, distributed
evaluation  perplexity, lm-eval, long-context tasks, groups, generation
speed       benchmarks of layers and models
results     measurements, losses and records of a run
reporting   tables, figures, claims and W&B from measurements; never imports torch
jobs        one module per job=
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from focus_exp.errors import UserError
    from focus_exp.models.adapter import load_adapter, push_to_hub, save_adapter
    from focus_exp.models.attach import attach, detach
    from focus_exp.models.methods import disable_method, freeze, is_causal, set_routing

__version__ = "0.1.0"

# imported on first use, so that reading records does not load torch
_HOMES = {
    "UserError": "focus_exp.errors",
    "load_adapter": "focus_exp.models.adapter",
    "push_to_hub": "focus_exp.models.adapter",
    "save_adapter": "focus_exp.models.adapter",
    "attach": "focus_exp.models.attach",
    "detach": "focus_exp.models.attach",
    "disable_method": "focus_exp.models.methods",
    "freeze": "focus_exp.models.methods",
    "is_causal": "focus_exp.models.methods",
    "set_routing": "focus_exp.models.methods",
}
__all__ = [
    "UserError",
    "attach",
    "detach",
    "disable_method",
    "freeze",
    "is_causal",
    "load_adapter",
    "push_to_hub",
    "save_adapter",
    "set_routing",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'focus_exp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
