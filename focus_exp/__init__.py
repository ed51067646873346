"""Focus: sparse attention by learned token groups, added to a frozen Hugging Face language model.

    model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
    attach(model, "focus", groups=4, window=128)
    freeze(model, "router")                      # train what is left in your own loop
    set_routing(model.eval(), hard=True, top_k=1)  # hard groups for use; in training mode gates are soft
    with disable_method(model): ...                    # the base model, bit for bit
    save_adapter(model, "my-adapter")            # safetensors and JSON
    push_to_hub("my-adapter", "me/focus-gpt2")   # the adapter/ of a run has a card beside it
    load_adapter(detach(model), "me/focus-gpt2") # or its folder; refuses another base model

`attach` first runs two short texts through the model with every pair kept, by masks, by the sparse path and through the
cache, and refuses it in one sentence unless that gives the base model's logits. `generate()`: see `models.hf_cache`.

In training mode gates are soft and the balance of routers moves, frozen or not. Before PEFT or a Trainer, which call
`model.train()`, this keeps trained routers and their hard groups as they are:

    from focus_exp.models.methods import attached_methods
    for method in attached_methods(model).values(): method.eval().train = lambda mode=True: None

Checkpoints of a Trainer with a PEFT model hold PEFT's numbers alone: where routers are trained beside LoRA keep them by
`save_adapter` too, and load them before resuming.

`save_pretrained` keeps the routers' numbers, but not the method: use `save_adapter`, or attach with the same options to
what `from_pretrained` gives, then `model.load_state_dict` of the saved file and `set_routing`.

attention   tensors alone: routing, selection, the oracle (reference), its blocked twin, the sparse path (disjoint parts
            of the kept pairs, exact kernels, merged by logsumexp), the cache by group, baselines; to add one: `method`
models      load, attach, self_check, what an attached model calls, what one does with it, cache, adapter
data        corpora, tokens, packing, resumable order
training    the Lightning module, phases, warm start and balance, callbacks, several processes
evaluation  perplexity with intervals, lm-eval on the live model, the ledger of what the mask removed, groups
speed       clocks, memory, break-even: Focus and full attention in turn
records     what a run leaves on disk: facts, typed; no sentence, no torch
reporting   from measurements to claims, the paper's tables, figures, the report and W&B; never imports torch
jobs        one module a job=
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
