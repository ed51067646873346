"""Load the router of an adapter, or train or fit one first."""

from __future__ import annotations

from transformers import PreTrainedModel

from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.jobs.evaluate import put_adapter
from focus_exp.jobs.fit import attach_method, fit
from focus_exp.jobs.run import Run
from focus_exp.models.methods import is_causal
from focus_exp.training.precision import Precision


def trains_router(config: Config) -> bool:
    """Whether the router is trained or fitted here, not an adapter's or left as it is."""
    return not config.adapter and bool(config.fitting or config.phases)


def put_router(
    run: Run, model: PreTrainedModel, blocks: SequenceDataset | None, precision: Precision, longest: int
) -> bool:
    """Attach the adapter's router, or train one as recipe and method say; whether there is a trained one now."""
    config = run.config
    if config.adapter:
        put_adapter(run, model, precision, longest)
        return True
    attach_method(model, config, precision)
    run.record.method = {"name": config.attention.name, "causal": is_causal(model)}
    if not trains_router(config):
        return False
    assert blocks is not None
    fit(run, model, blocks, precision)
    return True
