PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
SHELL := bash

RUN := $(VENV)/bin/python -m
# what the main job needs; and, with the names of extras of pyproject.toml behind it, what they add
STAMP := $(VENV)/.installed
TESTED := $(STAMP)-evaluation,slurm,sweeps,dashboard,dev
# need no network: the architectures' shapes, random weights, this repository's files as text
GPU_BENCH := job=bench bench.graphs=true model.hub_id=null data=files data.files='focus_exp/**/*.py'
GPU_FIT := recipe=none recipe.fit.sequences=8 recipe.fit.validation_sequences=2 recipe.fit.steps=8
GPU_FITTED := $(foreach groups,16 8,"attention=focus_dual attention.groups=$(groups) attention.density=0.2 $(GPU_FIT)") \
	"attention=key_gate $(GPU_FIT)"
GPU_LAYERS := $(foreach backend,triton flash,"attention=focus attention.backend=$(backend) recipe=none bench.step_lengths=[16384]") \
	"attention=focus_dual attention.groups=32 attention.density=0.2 $(GPU_FIT)" $(GPU_FITTED)
GPU_METHODS := "attention=focus attention.groups=8 recipe.phases.router.steps=5" $(GPU_FITTED)
GPU_LENGTHS := [4096,8192,16384,32768,65536,131072]

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install resolve retrofit reproduce-embedded report test test-all rehearse architectures faults smoke slurm sanitize gpu gpu-models lint format types clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-19s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## what the main job needs, in VENV (.venv) with PYTHON (python3); install-<extra> adds an extra

install-%: $(STAMP)-% ;

.PRECIOUS: $(STAMP)-%

# Said before, while packages of megabytes come, and after; pip's last lines where it fails. The stamp is last, so that a
# broken attempt is taken up again. uv serves where the environment has no pip, as in those that it makes.
define install
	@set -o pipefail; log=$$(mktemp); began=$$SECONDS; \
	$(RUN) pip --version >/dev/null 2>&1 && pip="$(RUN) pip install" || pip="uv pip install --python $(VENV)/bin/python"; \
	command="$$pip --editable '$(2)' --constraint constraints.txt"; \
	echo "installing $(1) into $(VENV) ..."; \
	$(VENV)/bin/python -c 'from importlib.metadata import version as v; print("  torch", v("torch"), "is there")' \
		2>/dev/null || echo "  torch is not there: $(TORCH_SIZE)"; \
	PYTHONUNBUFFERED=1 eval "$$command" 2>&1 | tee "$$log" | while read -r line; do \
		case $$line in \
			Downloading*[MG]B\) | Downloading*[MG]iB\) | Installed*) echo "  $${line#* }" ;; \
			"Successfully installed"*) set -- $$line; echo "  $$(($$# - 2)) packages" ;; \
		esac; \
	done; code=$$?; \
	[ $$code = 0 ] && echo "... $$((SECONDS - began)) s" || { tail -n 20 "$$log"; echo "failed: $$command"; }; \
	rm -f "$$log"; exit $$code
	@touch $@
endef

TORCH_SIZE = on Linux its CUDA build comes, 3 GB to download and 6 GB on disk$(if \
	$(shell command -v nvidia-smi),,; no NVIDIA GPU here: README says how to give a CPU build first)

$(STAMP): pyproject.toml constraints.txt
	@python=$(VENV)/bin/python; $$python -c '' 2>/dev/null || python=$(PYTHON); \
		$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "focus_exp runs on Python 3.11 to 3.13 (hydra-core 1.3 does not start on 3.14); name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(VENV)/bin/python -c '' 2>/dev/null || { \
		echo "creating $(VENV)"; $(PYTHON) -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear) $(VENV); }
	@{ $(RUN) pip --version || uv --version || $(RUN) ensurepip; } >/dev/null 2>&1
	$(call install,the packages of the main job,.)

$(STAMP)-%: $(STAMP)
	$(call install,what the extras $* add,.[$*])

resolve: ## whether pip resolves the package and its extras with its plain configuration, for each Python here
	tests/resolve.sh $(ARGS)

retrofit: $(STAMP) ## train Focus routers on a frozen GPT-2 124M; more overrides in ARGS
	$(RUN) focus_exp +experiment=retrofit_124m $(ARGS)

reproduce-embedded: $(STAMP)-evaluation ## every table at small scale, resumable, then the report; ARGS=budget=quick: only that all of it runs
	$(RUN) focus_exp job=reproduce assets=embedded $(ARGS)

report: $(STAMP) ## all records and the paper's claims as runs/report/report.md and .tex
	$(RUN) focus_exp job=report $(ARGS)

test: $(TESTED) ## the quick tests, which need neither a GPU nor SLURM
	$(RUN) pytest -n $(JOBS) --dist loadfile -m 'not gpu and not slurm and not slow' $(ARGS)

test-all: $(TESTED) ## the same with those that take long
	$(RUN) pytest -n $(JOBS) --dist loadfile -m 'not gpu and not slurm' $(ARGS)

# what it trains and measures, its logs and its table are below that folder
rehearse: $(TESTED) ## every experiment, page and report at the paper's budget, on tiny models of a local hub; ARGS='speed report': these
	rm -rf runs/rehearsal
	JOBS=$(JOBS) $(VENV)/bin/python tests/rehearse.py runs/rehearsal $(ARGS)

architectures: $(STAMP)-dev ## Focus on every causal language model that transformers has, tiny; ARGS=llama: that one alone
	$(VENV)/bin/python tests/architectures.py $(ARGS)

faults: $(TESTED) ## kill, fill and damage tiny runs in 37 ways; each resumes to the same record
	$(RUN) pytest -n $(JOBS) tests/test_faults.py $(ARGS)

smoke: $(TESTED) ## every experiment file on a tiny random model
	$(RUN) pytest -n $(JOBS) tests/test_experiments.py -m 'not gpu' $(ARGS)

slurm: $(TESTED) ## sweeps on a SLURM cluster of this one machine; as root also installs it
	tests/slurm_cluster.sh install || test $$? = 3
	$(RUN) pytest -m slurm -rs $(ARGS)

# torch itself is not instrumented: leaks are not looked for, and the sanitizers' libraries are loaded first
SANITIZED := FOCUS_EXP_CXXFLAGS='-fsanitize=address,undefined -fno-sanitize-recover=all -g' ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)"

sanitize: $(STAMP)-dev ## the CPU kernel's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(SANITIZED) $(RUN) pytest -n 0 -p no:cacheprovider tests/test_cpu_kernel.py tests/test_kernels.py -k "not triton" $(ARGS)

gpu: $(TESTED) ## kernels checked on a CUDA device, and one layer timed: as called and as CUDA graphs
	TRITON_INTERPRET=0 $(RUN) pytest -m gpu tests/test_gpu.py -k kernels
	for model in smollm2_135m qwen2_5_coder_0_5b mistral_7b_instruct; do for method in $(GPU_LAYERS); do \
		$(RUN) focus_exp $(GPU_BENCH) budget=quick model=$$model $$method \
			bench.lengths=[1024,2048,4096,8192,16384,65536,262144] $(ARGS) || exit; \
	done; done

gpu-models: $(TESTED) ## tests and benchmarks of whole models that need a CUDA device
	TRITON_INTERPRET=0 $(RUN) pytest -m gpu $(ARGS)
	$(RUN) focus_exp $(GPU_BENCH) +experiment=speed budget=paper model=smollm2_135m recipe.phases.router.steps=5 bench.groups=[4,8,32]
	for model in smollm2_135m mistral_7b_instruct; do for method in $(GPU_METHODS); do \
		$(RUN) focus_exp $(GPU_BENCH) budget=quick model=$$model model.architecture.max_position_embeddings=131072 $$method \
			bench.lengths=$(GPU_LENGTHS) bench.prefill_lengths=$(GPU_LENGTHS) bench.decode_lengths=$(GPU_LENGTHS) \
			bench.compile=[default,reduce-overhead] || exit; \
	done; done

lint: $(STAMP)-dev ## ruff: rules and formatting
	$(RUN) ruff check .
	$(RUN) ruff format --check .

format: $(STAMP)-dev ## let ruff rewrite
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

types: $(TESTED) ## mypy on focus_exp
	$(RUN) mypy

clean: ## remove caches and build leftovers; keep .venv and runs
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find conf focus_exp tests -name __pycache__ -prune -exec rm -rf {} +
