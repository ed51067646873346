"""Run the model and generation tests of transformers and the decoder tests of PEFT on models with Focus attached.

    python tests/peers.py [--checkout FOLDER] [suites...]

A suite is a model family or "peft". Every test runs on the base model; those that pass run again with Focus attached to
each causal language model that they build: "kept" (top_k = groups, no pair pruned) and "hard" (hard routing, top_k = 1).
Outcomes are cached under PEERS_CACHE (~/.cache/focus_exp/peers); differences are written to tests/peers.md, grouped by
the first rule of tests/peers.yaml that matches. Exits 1 where no rule matches.

The tests are not part of this repository. pip downloads both source distributions, which are checked by SHA-256. That
of transformers lacks tests/models and tests/generation: these come from a git checkout of the nearest release.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("PEERS_CACHE", "~/.cache/focus_exp/peers")).expanduser()
FAMILIES = "gpt2 llama mistral qwen2 qwen3 gemma2 gemma3 olmo2 phi3 gpt_neox mixtral lfm2".split()
SUITES = [*FAMILIES, "peft"]
MODES = {"kept": {"groups": 4, "top_k": 4}, "hard": {"groups": 4, "top_k": 1}}
NEAR = {"window": 2, "sinks": 1}  # the tests' sequences have 7 tokens
TIMEOUT = 120  # seconds per test

SDISTS = {
    "transformers-5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
    "peft-0.21.2": "b803ccfb3f3f316004d850284306687833a2235ea278fb56abc856203456142e",
}
HELPER = "parameterized==0.9.0"
# of the source distribution of transformers; its other shared files need modules that only a checkout has
SHARED = ["test_modeling_common.py", "test_configuration_common.py", "test_memory_cleanup_mixin.py"]
CHECKOUT_PATHS = ["tests", "utils"]
PEFT_CONFIGS = "LoraConfig and not (Ada or Gra or BD) or IA3Config or PromptTuning or PrefixTuning"
# minutes each (compilation, training, a large vocabulary): for one family alone
LONG = "compilation_all_outputs or compile_model_forward or training_overfit or bc_torch_dtype"
# hub names in PEFT's tests -> model_type; random models of these types stand in for them
HUB = {
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": "gemma3_text",
    "hf-internal-testing/tiny-random-MistralForCausalLM": "mistral",
    "hf-internal-testing/tiny-random-gpt2": "gpt2",
    "peft-internal-testing/tiny-dummy-qwen2": "qwen2",
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": "gpt2",
    "peft-internal-testing/tiny-random-GPTJForCausalLM": "gptj",
    "peft-internal-testing/tiny-random-OPTForCausalLM": "opt",
    "trl-internal-testing/tiny-Qwen3ForCausalLM": "qwen3",
    "trl-internal-testing/tiny-random-LlamaForCausalLM": "llama",
}


# --- sources ----------------------------------------------------------------------------------------------------------


def prepare_sources(checkout: Path | None) -> None:
    """Download and lay out the tests of both libraries in the cache."""
    import transformers

    CACHE.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    for name, digest in SDISTS.items():
        archive = CACHE / f"{name}.tar.gz"
        if not archive.exists():
            options = ["--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest", str(CACHE)]
            subprocess.run([*pip, "download", "--quiet", *options, name.replace("-", "==")], check=True)
        if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != digest:
            sys.exit(f"{archive} must have SHA-256 {digest} (got {found}). Delete it and run again.")
        if not (CACHE / name).exists():
            with tarfile.open(archive) as tar:
                tar.extractall(CACHE, filter="data")
    if not (CACHE / "site").exists():
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(CACHE / "site"), HELPER], check=True)
    tree = CACHE / "transformers"
    if checkout is not None:
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        git = ["git", "-C", str(checkout)]
        files = subprocess.check_output([*git, "archive", "HEAD", *CHECKOUT_PATHS])
        subprocess.run(["tar", "-x", "-C", str(tree)], input=files, check=True)
        version = subprocess.check_output([*git, "show", "HEAD:src/transformers/__init__.py"], text=True)
        (tree / "VERSION").write_text(re.search(r'__version__ = "(.+)"', version)[1])
        (tree / "src").mkdir()
        (tree / "src" / "transformers").symlink_to(Path(transformers.__file__).parent)
    if not tree.exists():
        sys.exit(
            "peers: tests/models of transformers is in no source distribution. Clone release "
            "v5.23.0 of transformers and pass its folder: make peers ARGS='--checkout FOLDER'"
        )
    for file in SHARED:
        shutil.copy(CACHE / "transformers-5.23.0" / "tests" / file, tree / "tests" / file)
    for folder in (tree, CACHE / "peft-0.21.2"):
        (folder / "pytest.ini").write_text("[pytest]\n")
    write_hub(CACHE / "hub")


def write_hub(folder: Path) -> None:
    """Write random tiny models under the names that PEFT's tests load, in the layout of the hub's cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, kind in HUB.items():
        target = folder / f"models--{name.replace('/', '--')}"
        if target.exists():
            continue
        sizes: dict[str, Any] = {
            "vocab_size": 1000,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        if kind not in ("gpt2", "gptj"):
            sizes["max_position_embeddings"] = 512
        if kind == "opt":
            sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32}
        elif kind == "gptj":
            sizes |= {"rotary_dim": 4}
        elif kind != "gpt2":
            sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
        config = AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=1, pad_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(target / "snapshots" / "0")
        (target / "refs").mkdir()
        (target / "refs" / "main").write_text("0")


# --- pytest plugin ----------------------------------------------------------------------------------------------------


class Plugin:
    """Attach Focus in `mode` to the causal language models that tests build; write outcomes to `target`."""

    def __init__(self, mode: str, family: str, target: Path, only: set[str] | None):
        self.mode, self.family, self.target, self.only = mode, family, target, only
        self.loading = self.attached = 0
        self.outcomes: dict[str, dict[str, Any]] = {}

    def attach(self, model: Any) -> None:
        import torch

        from focus_exp.models.attach import attach
        from focus_exp.models.attached import set_routing

        self.attached += 1
        if self.mode == "base":
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # equal routers in equal models
            attach(model, "focus", **MODES[self.mode], **NEAR)
        set_routing(model, hard=True)

    def patch_class(self, cls: type) -> None:
        """Attach at the end of `cls(config)`. Each model gets its own configuration, as attach writes into it."""
        import copy

        original, plugin = cls.__init__, self

        def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            inner = "_peers_building" in self.__dict__
            self.__dict__["_peers_building"] = True
            original(self, config if inner or plugin.loading else copy.deepcopy(config), *args, **kwargs)
            if not inner:
                del self.__dict__["_peers_building"]
                if not plugin.loading:
                    plugin.attach(self)

        __init__.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[misc]

    def patch_loading(self) -> None:
        from transformers import PreTrainedModel

        from focus_exp.models.attach import detach

        original, plugin = PreTrainedModel.from_pretrained.__func__, self

        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            plugin.loading += 1
            try:
                result = original(cls, *args, **kwargs)
            finally:
                plugin.loading -= 1
            model = result[0] if isinstance(result, tuple) else result
            if not plugin.loading and model.can_generate():
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

    def pytest_configure(self, config: Any) -> None:
        import types

        import torch

        torch.set_num_threads(1)
        self.patch_loading()
        # tests on several processes are left out
        for name, mixin in (
            ("fsdp", "FSDP"),
            ("tensor_parallel", "TensorParallel"),
            ("expert_parallel", "ExpertParallel"),
        ):
            module = types.ModuleType(f"tests.test_{name}_mixin")
            setattr(module, f"{mixin}TesterMixin", type(f"{mixin}TesterMixin", (), {}))
            sys.modules[module.__name__] = module

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        from transformers import PreTrainedModel

        if self.family == "peft":
            always = type("Always", (dict,), {"__contains__": lambda *_: True, "__missing__": lambda *_: 1})
            sys.modules["tests.testing_utils"]._HUB_MODEL_ACCESSES = always()  # the hub is taken as visited before
        todo = [PreTrainedModel]
        while todo:
            cls = todo.pop()
            todo += cls.__subclasses__()
            if cls.__module__.startswith("transformers.models.") and cls.__name__.endswith(
                ("ForCausalLM", "LMHeadModel")
            ):
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
        self.target.write_text(json.dumps(self.outcomes, indent=1))


def run_in_process(mode: str, suite: str, target: Path) -> int:
    import pytest

    only = None
    if mode != "base":
        base = json.loads(outcomes_path(suite, "base").read_text())
        only = {test for test, row in base.items() if row["outcome"] == "passed" and row["attached"]}
    files = ["tests/test_decoder_models.py", "-k", PEFT_CONFIGS]
    if suite != "peft":
        chosen = "not Integration" if suite == "llama" else f"not (Integration or {LONG})"
        files = [f"tests/models/{suite}/test_modeling_{suite}.py", "-k", chosen]
    plugin = Plugin(mode, suite, target, only)
    return int(
        pytest.main(
            ["-q", "--tb=short", "--durations=20", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir=.", *files],
            plugins=[plugin],
        )
    )


# --- runs and report --------------------------------------------------------------------------------------------------


def outcomes_path(suite: str, mode: str) -> Path:
    return CACHE / "outcomes" / f"{suite}-{mode}.json"


def run_suite(suite: str, mode: str) -> None:
    folder = CACHE / ("peft-0.21.2" if suite == "peft" else "transformers")
    target = outcomes_path(suite, mode)
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    env = os.environ | {
        "PYTHONPATH": f"{HERE.parent}:{CACHE / 'site'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(CACHE / "hub"),
    }
    started = time.monotonic()
    with target.with_suffix(".log").open("w") as log:
        command = [sys.executable, str(HERE / "peers.py"), "--run", mode, str(target), suite]
        subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log)
    counts = Counter(row["outcome"] for row in json.loads(target.read_text()).values()) if target.exists() else "crash"
    print(
        f"{suite} {mode}: {dict(counts) if counts != 'crash' else counts}, {time.monotonic() - started:.0f} s",
        flush=True,
    )


def write_report(path: Path) -> int:
    """Write the table of counts and the differences by reason; return the number of unexplained differences."""
    rules = yaml.safe_load((HERE / "peers.yaml").read_text())
    counts, totals = [], Counter()
    groups: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for suite in SUITES:
        if not all(outcomes_path(suite, mode).exists() for mode in ("base", *MODES)):
            continue
        base = json.loads(outcomes_path(suite, "base").read_text())
        passing = [test for test, row in base.items() if row["outcome"] == "passed"]
        row = Counter(base=len(passing), building=sum(base[test]["attached"] > 0 for test in passing))
        for mode in MODES:
            outcomes = json.loads(outcomes_path(suite, mode).read_text())
            for test in passing:
                result = outcomes.get(test, {"outcome": "crash", "why": "the process died"})
                row[mode] += result["outcome"] == "passed"
                if result["outcome"] != "passed":
                    short = f"{suite}::{test.split('::')[-1]}"
                    why = re.sub(r"\s+", " ", result["why"]).replace("|", "\\|") or result["outcome"]
                    groups[reason_for(rules, mode, short, why)].append((short, mode, why[:160]))
        counts.append((suite, row))
        totals += row
    columns = ("base", "building", *MODES)
    lines = [
        "# Peers' tests with Focus attached",
        "",
        (HERE / "peers.md.head").read_text().strip() if False else "",
        "",
    ]
    lines += ["| suite | base | building a causal LM | kept | hard |", "|---|---|---|---|---|"]
    lines += [
        f"| {suite} | " + " | ".join(str(row[c]) for c in columns) + " |" for suite, row in [*counts, ("all", totals)]
    ]
    path.write_text("\n".join(lines) + "\n")
    return len(groups["unexplained"])


def reason_for(rules: list[dict[str, str]], mode: str, test: str, why: str) -> str:
    """Return the reason of the first rule whose patterns all match, or "unexplained"."""
    for rule in rules:
        texts = {"test": test, "error": why, "mode": mode}
        if all(re.search(rule[key], text) for key, text in texts.items() if key in rule):
            return rule["reason"]
    return "unexplained"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="suite", help=", ".join(SUITES))
    parser.add_argument("--checkout", type=Path, help="git checkout of transformers")
    parser.add_argument("--mode", choices=("base", *MODES), help="run this mode alone")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_in_process(args.run[0], args.suites[0], Path(args.run[1]))
    prepare_sources(args.checkout)
    for suite in args.suites or SUITES:
        for mode in [args.mode] if args.mode else ("base", *MODES):
            run_suite(suite, mode)
    return min(write_report(HERE / "peers.md"), 1)


if __name__ == "__main__":
    sys.exit(main())
