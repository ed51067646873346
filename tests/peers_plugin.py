"""Pytest plugin of tests/peers.py: attach Focus to each causal language model that a test builds.

    python tests/peers_plugin.py SUITE

runs in the folder that holds the tests and writes PEERS_CACHE/outcomes/SUITE-MODE.json of each mode.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import signal
import sys
import time
import types
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from focus_exp.models.attach import attach, detach
from focus_exp.models.methods import set_routing

CACHE = Path(os.environ.get("PEERS_CACHE", "~/.cache/focus_exp/peers")).expanduser()
# tests on several processes and of diffusion models are left out
STUBS = {
    "tests.test_fsdp_mixin": "FSDPTesterMixin",
    "tests.test_tensor_parallel_mixin": "TensorParallelTesterMixin",
    "tests.test_expert_parallel_mixin": "ExpertParallelTesterMixin",
    "diffusers": "StableDiffusionPipeline",
}
CAUSAL_LM = ("ForCausalLM", "LMHeadModel")
MODES = {"kept": {"groups": 4, "top_k": 4}, "hard": {"groups": 4, "top_k": 1}}
NEAR = {"window": 2, "sinks": 1}  # the tests' sequences have 7 tokens
TIMEOUT = 120  # seconds per test

PEFT_CONFIGS = "[LoraConfig or [IA3Config or [PromptTuningConfig or [PrefixTuningConfig"
# long (compilation, training, a large vocabulary) or many alike: for one family alone
LONG = "compilation_all_outputs or compile_model_forward or training_overfit or bc_torch_dtype or fp16 or bf16"


def outcomes_path(suite: str, mode: str) -> Path:
    return CACHE / "outcomes" / f"{suite}-{mode}.json"


class Plugin:
    """Attach Focus in `mode` to the causal language models that tests build; keep outcomes by test."""

    def __init__(self, suite: str):
        self.suite = suite
        self.loading = self.attached = 0
        self.classes: set[type] = set()

    def start(self, mode: str, only: set[str] | None) -> None:
        self.mode, self.only = mode, only
        self.outcomes: dict[str, dict[str, Any]] = {}

    def attach(self, model: Any) -> None:
        self.attached += 1
        if self.mode == "base":
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # equal routers in equal models
            attach(model, "focus", **MODES[self.mode], **NEAR)
        set_routing(model, hard=True)

    def patch_class(self, cls: type) -> None:
        """Attach at the end of `cls(config)`. Each model gets its own configuration, as attach writes into it."""
        self.classes.add(cls)
        original, plugin = cls.__init__, self

        def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            inner = "_peers_building" in self.__dict__
            self.__dict__["_peers_building"] = True
            original(self, config if inner or plugin.loading else copy.deepcopy(config), *args, **kwargs)
            if not inner:
                del self.__dict__["_peers_building"]
                if not plugin.loading:
                    plugin.attach(self)

        __init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[misc]

    def patch_loading(self) -> None:
        original, plugin = PreTrainedModel.from_pretrained.__func__, self

        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            plugin.loading += 1
            try:
                result = original(cls, *args, **kwargs)
            finally:
                plugin.loading -= 1
            model = result[0] if isinstance(result, tuple) else result
            if not plugin.loading and type(model).__name__.endswith(CAUSAL_LM):
                plugin.attach(model)
            return result

        PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        set_implementation = PreTrainedModel.set_attn_implementation

        def set_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> None:
            attached = getattr(self, "focus_attachment", None) is not None
            if attached:  # as the error message of an attached model says
                detach(self)
            set_implementation(self, *args, **kwargs)
            if attached:
                plugin.attach(self)

        PreTrainedModel.set_attn_implementation = set_attn_implementation

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self.suite == "peft":
            always = type("Always", (dict,), {"__contains__": lambda *_: True, "__missing__": lambda *_: 1})
            sys.modules["tests.testing_utils"]._HUB_MODEL_ACCESSES = always()  # the hub is taken as visited before
        todo = [PreTrainedModel]
        while todo:
            cls = todo.pop()
            todo += cls.__subclasses__()
            is_causal_lm = cls.__module__.startswith("transformers.models.") and cls.__name__.endswith(CAUSAL_LM)
            if is_causal_lm and cls not in self.classes:
                self.patch_class(cls)
        items[:] = [item for item in items if self.only is None or item.nodeid in self.only]

    def pytest_runtest_setup(self, item: Any) -> None:
        def expire(*_: Any) -> None:
            raise TimeoutError(f"over {TIMEOUT} s")

        self.attached = self.loading = 0
        signal.signal(signal.SIGALRM, expire)
        signal.alarm(TIMEOUT)

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.outcomes.setdefault(report.nodeid, {"outcome": "passed", "attached": 0, "why": ""})
        row["attached"] = max(row["attached"], self.attached)
        if report.failed and row["outcome"] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            # what a test case's own assertion hides, comes last
            row |= {"outcome": "failed", "why": (crash.message if crash else str(report.longrepr))[:600]}
        elif report.skipped and row["outcome"] == "passed" and type(report).__name__ != "SubtestReport":
            row["outcome"] = "skipped"

    def pytest_sessionfinish(self) -> None:
        signal.alarm(0)


def run_in_process(suite: str) -> None:
    """Run the suite in each mode, in one process: importing the tests takes longer than most of them."""
    torch.set_num_threads(1)
    files = ["tests/test_decoder_models.py", "-k", PEFT_CONFIGS]
    if suite != "peft":
        chosen = "not Integration" if suite == "llama" else f"not (Integration or {LONG})"
        files = [f"tests/models/{suite}/test_modeling_{suite}.py", "-k", chosen]
    plugin = Plugin(suite)
    plugin.patch_loading()
    for module, name in STUBS.items():
        sys.modules[module] = types.ModuleType(module)
        sys.modules[module].__spec__ = ModuleSpec(module, None)
        setattr(sys.modules[module], name, type(name, (), {}))
    for mode in ("base", *MODES):
        only, started = None, time.monotonic()
        if mode != "base":
            base = json.loads(outcomes_path(suite, "base").read_text())
            only = {test for test, row in base.items() if row["outcome"] == "passed" and row["attached"]}
        plugin.start(mode, only)
        pytest.main(["-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir=.", *files], [plugin])
        outcomes_path(suite, mode).write_text(json.dumps(plugin.outcomes, indent=1))
        counts = dict(Counter(row["outcome"] for row in plugin.outcomes.values()))
        print(f"{suite} {mode}: {counts}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_in_process(sys.argv[1])
