"""job=evaluate and job=build_tasks."""

from __future__ import annotations

from transformers import PreTrainedModel

from focus_exp.assets import cache_root
from focus_exp.config import Config
from focus_exp.data.long_range import build_suite
from focus_exp.errors import UserError
from focus_exp.models.adapter import load_adapter, read_description
from focus_exp.models.methods import is_causal, set_routing
from focus_exp.runs.compose import compose_adapter
from focus_exp.runs.open import Run, open_run
from focus_exp.runs.prepare import prepare
from focus_exp.runs.resume import print_finished


def evaluate(config: Config) -> None:
    """Measure a trained adapter, on any data, against its base.

    Adapters of attention=focus are measured next to their controls.
    The base is that of the adapter's run, or else of the Hub, unless an experiment or model= chooses one.
    `eval=downstream` runs lm-eval tasks and states the fraction of pairs pruned on each request; `eval=long_range`
    runs tasks whose answers lie beyond the window. Both need make install-evaluation.
    """
    if not config.adapter:
        raise UserError("adapter must be set with job=evaluate. Type adapter=<run folder>/adapter or owner/name.")
    evaluate_adapter(compose_adapter(config))


def evaluate_adapter(config: Config) -> None:
    """Measure `config.adapter`; `config` has its method and base."""
    if print_finished(config):
        return
    with open_run(config) as run:
        setup = prepare(run)
        load_trained(run, setup.model)
        setup.measure_base()
        setup.measure_attached()
        setup.write(run)


def load_trained(run: Run, model: PreTrainedModel) -> None:
    """Attach the run's adapter, and record it."""
    config, description = run.config, read_description(str(run.config.adapter))
    load_adapter(model, str(config.adapter), check_base=config.check_base)
    set_routing(model, hard=False, backend=config.attention.backend)
    run.record.method = {
        "name": config.attention.name,
        "causal": is_causal(model),
        "trainable_parameters": description["trainable_parameters"],
        "trained": {name: description[name] for name in ("steps", "tokens", "seed") if name in description},
    }
    if (then := description["base_model"]["fingerprint"]) != run.record.model.get("fingerprint"):
        run.warn(f"check_base=false: the adapter was trained on other weights (fingerprint {then[:12]})")
    if (seed := description.get("seed", config.seed)) != config.seed:
        run.warn(f"seed should be {seed}, that of the adapter (got {config.seed}): reports tell runs apart by it")


def build_tasks(config: Config) -> None:
    """Write the long-range suite from the held-out books, named by its hash.

    Its answers are further back than `eval.long_range_distance` tokens, or than the attention's window.
    """
    window = config.answer_distance
    suite = build_suite(cache_root(config.cache_dir), window)
    print(f"long-range suite for a window of {window}: {suite.folder}\nsha256 {suite.digest}")
