"""What training does for the options against dominance: gather auxiliary losses, move centroids between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn

from focus_exp.attention.focus import Focus
from focus_exp.attention.mitigations import follow_means, kmeans
from focus_exp.config_attention import FocusConfig
from focus_exp.models.methods import find_routers


@contextmanager
def auxiliary_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """The list that a forward pass within the block fills with the weighted losses of the layers that have any."""
    losses: list[Tensor] = []
    methods = find_routers(model).values()
    for method in methods:
        method.losses = losses
    try:
        yield losses
    finally:
        for method in methods:
            method.losses = None


class CentroidUpdates(Callback):
    """Centroids that no gradient moves: after every step towards the means of their tokens ("ema"), or every so many
    steps to where k-means puts them ("recluster"), with the average length that they had. Whole steps count, all
    processes' tokens together."""

    def __init__(self, model: nn.Module, attention: FocusConfig) -> None:
        self.update = attention.centroid_update
        self.decay = attention.centroid_decay
        self.every = attention.recluster_every
        self.methods = find_routers(model) if self.update != "gradient" else {}
        self.last_step = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.last_step = trainer.global_step
        self._gather([])

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self.last_step:
            return
        self.last_step = step
        # at the last step nothing would be trained on the new groups
        due = self.update == "ema" or (step % self.every == 0 and step < trainer.max_steps)
        for layer, method in self.methods.items() if due else ():
            assert method.projected is not None
            tokens = module.all_gather(torch.stack(method.projected))  # [batches, N, R], of several processes each
            assert isinstance(tokens, Tensor)
            if tokens.ndim > 3:  # to where a single process would see them: k-means begins with some of them
                tokens = tokens.transpose(0, 1)
            self._move(method, tokens.flatten(0, -2), seed=step + 1_000_003 * layer)
        self._gather([])

    @torch.no_grad()
    def _move(self, method: Focus, tokens: Tensor, seed: int) -> None:
        router, before = method.router, method.router.centroids
        if self.update == "ema":
            after = follow_means(before, tokens, router.compare(tokens).argmax(-1), self.decay)
        else:
            after = kmeans(tokens, len(before), seed)
            # scores are dot products: a longer centroid would take tokens that are nearer to another one
            after = nn.functional.normalize(after, dim=-1) * before.norm(dim=-1).mean()
        before.copy_(after)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._gather(None)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._gather(None)

    def _gather(self, tokens: list[Tensor] | None) -> None:
        for method in self.methods.values():
            method.projected = None if tokens is None else list(tokens)
