"""Run the model and generation tests of transformers and the decoder tests of PEFT on models with Focus attached.

    python tests/peers.py [--checkout FOLDER] [suites...]

A suite is a model family or "peft". Every test runs on the base model. Those that pass run again with Focus attached
to each causal language model that they build: "kept" (top_k = groups, no pair pruned) and "hard" (top_k = 1), both
with hard routing in eval mode. Outcomes are cached under PEERS_CACHE (~/.cache/focus_exp/peers). The differences are
written to tests/peers.md by the first rule of tests/peers.yaml that matches; exits 1 where none matches.

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
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import yaml
from peers_plugin import CACHE, MODES, outcomes_path

HERE = Path(__file__).parent
SUITES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "gpt_neox", "mixtral"]
SUITES += ["lfm2", "peft"]
SDISTS = {
    "transformers-5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
    "peft-0.21.2": "b803ccfb3f3f316004d850284306687833a2235ea278fb56abc856203456142e",
}
HELPER = "parameterized==0.9.0"
# of the source distribution of transformers; its other shared files need modules that only a checkout has
SHARED = ["test_modeling_common.py", "test_configuration_common.py", "test_memory_cleanup_mixin.py"]
CHECKOUT_PATHS = ["tests", "utils"]
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
    (CACHE / "peft-0.21.2" / "tests" / "__init__.py").touch()  # its tests import each other
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


# --- runs and report --------------------------------------------------------------------------------------------------


def run_suite(suite: str) -> None:
    outcomes_path(suite, "").parent.mkdir(exist_ok=True)
    for mode in ("base", *MODES):
        outcomes_path(suite, mode).unlink(missing_ok=True)
    env = os.environ | {
        "PYTHONPATH": f"{HERE.parent}:{CACHE / 'site'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(CACHE / "hub"),
        "TQDM_DISABLE": "1",
    }
    command = [sys.executable, str(HERE / "peers_plugin.py"), suite]
    with (CACHE / "outcomes" / f"{suite}.log").open("w") as log:
        folder = CACHE / ("peft-0.21.2" if suite == "peft" else "transformers")
        subprocess.run(command, cwd=folder, env=env, stdout=log)


def write_report(path: Path) -> int:
    """Write counts and differences by reason; return the number of unexplained differences."""
    rules = yaml.safe_load((HERE / "peers.yaml").read_text())
    rows: list[tuple[str, Counter[str]]] = []
    groups: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for suite in SUITES:
        if not all(outcomes_path(suite, mode).exists() for mode in ("base", *MODES)):
            continue
        base = json.loads(outcomes_path(suite, "base").read_text())
        passing = {test: row for test, row in base.items() if row["outcome"] == "passed"}
        count = Counter(base=len(passing), attached=sum(row["attached"] > 0 for row in passing.values()))
        for mode in MODES:
            outcomes = json.loads(outcomes_path(suite, mode).read_text())
            for test, row in passing.items():
                missing = {"outcome": "failed", "why": "the process died"}
                result = outcomes.get(test, missing) if row["attached"] else row  # without a causal LM: as the base
                if result["outcome"] == "passed":
                    count[mode] += 1
                    continue
                name = test.split("::")[-1].split("[")[0] if suite == "peft" else test.split("::")[-1]
                why = re.sub(r"\s+", " ", result["why"]).replace("|", "\\|") or result["outcome"]
                reason = reason_for(rules, mode, name, why)
                groups[reason][name, why[:120]].append(f"{suite} {mode}")
        rows.append((suite, count))
    rows.append(("all", sum((count for _, count in rows), Counter())))
    version = (CACHE / "transformers" / "VERSION").read_text()
    lines = [
        "# Tests of transformers and PEFT with Focus attached",
        "",
        f"Written by `make peers`. Tests of {' and '.join(SDISTS)}; model and generation tests of {version}.",
        "",
        "base: tests that pass on the base model; attached: of those, tests that build a causal language model. "
        "kept (top_k = groups) and hard (top_k = 1): tests that also pass with Focus attached.",
        "",
        "| suite | base | attached | kept | hard |",
        "|---|---:|---:|---:|---:|",
        *(f"| {suite} | {n['base']} | {n['attached']} | {n['kept']} | {n['hard']} |" for suite, n in rows),
    ]
    order = [*dict.fromkeys(rule["reason"] for rule in rules), "unexplained"]
    for reason in filter(groups.__contains__, order):
        total = sum(map(len, groups[reason].values()))
        lines += ["", f"## {reason} ({total})", "", "| test | suites | message |", "|---|---|---|"]
        for (name, why), where in sorted(groups[reason].items()):
            modes: dict[str, list[str]] = defaultdict(list)
            for entry, times in Counter(where).items():
                suite, mode = entry.split()
                modes[mode].append(suite if times == 1 else f"{suite} ({times})")
            text = "; ".join(f"{mode}: {', '.join(suites)}" for mode, suites in modes.items())
            lines.append(f"| {name} | {text} | {why} |")
    path.write_text("\n".join(lines) + "\n")
    return sum(map(len, groups["unexplained"].values()))


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
    args = parser.parse_args()
    prepare_sources(args.checkout)
    for suite in args.suites or SUITES:
        run_suite(suite)
    return min(write_report(HERE / "peers.md"), 1)


if __name__ == "__main__":
    sys.exit(main())
