"""Validation of a state: the loss on the validation sets, the BLEU score of translations, and the source gain."""

import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from branchnorm_jax.data.batches import BatchPlan
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.prepare import Corpus
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.evaluation.bleu import corpus_bleu
from branchnorm_jax.model import growth
from branchnorm_jax.model.losses import LossSums
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DataConfig
from branchnorm_jax.parallel.mesh import to_devices
from branchnorm_jax.training.state import Batch, TrainState
from branchnorm_jax.training.step import make_eval_step

SOURCE_GAIN_SENTENCES = 128
"""Number of validation sentences for `source_gain`."""


class Validator:
    """Validates states of one run."""

    def __init__(
        self, config: Config, model: Transformer, mesh: Mesh, corpus: Corpus, plans: Sequence[BatchPlan]
    ) -> None:
        """Prepares validation. `plans` has one batch plan for each direction in `corpus.validated`."""
        self.config, self.mesh, self.corpus, self.plans = config, mesh, corpus, plans
        self.translator = Translator(model, corpus.tokenizer, config.decode)
        self.alpha = jax.jit(growth.alpha(config.model))
        self.eval_step = jax.jit(make_eval_step(model, config))

    def losses(self, state: TrainState) -> dict[str, LossSums]:
        """Returns the loss sums of each validation set, by language pair."""
        directions = zip(self.corpus.validated, self.plans, strict=True)
        return {direction.pair: self._loss_sums(state, plan) for direction, plan in directions}

    def source_gain(self, state: TrainState) -> float:
        """Returns the mean of `_source_gain` over the validation sets, in nats per target token."""
        return statistics.mean(self._source_gain(state, plan) for plan in self.plans)

    def bleu(self, state: TrainState, count: int) -> dict[str, float]:
        """Returns BLEU of the first `count` sentences of each validation set, by language pair."""
        return {direction.pair: self._bleu(state, direction, count) for direction in self.corpus.validated}

    def _loss_sums(self, state: TrainState, plan: BatchPlan) -> LossSums:
        sums = [self.eval_step(state, Batch(*to_devices(self.mesh, batch))) for batch in plan.in_order()]
        return jax.tree.map(lambda *parts: float(sum(parts)), *jax.device_get(sums))

    def _source_gain(self, state: TrainState, plan: BatchPlan) -> float:
        """Returns the nll with shuffled sources minus the nll with the correct sources, in nats per target token.

        The source gain is 0 if the model does not use the source.
        """
        multiple = self.config.data.row_multiple
        batch = plan.single(max(SOURCE_GAIN_SENTENCES // multiple, 1) * multiple)
        if len(batch.source) % multiple:
            return 0.0
        shuffled = batch._replace(source=np.roll(batch.source, 1, axis=0))
        own, other = (self.eval_step(state, Batch(*to_devices(self.mesh, text))) for text in (batch, shuffled))
        return float((other.nll - own.nll) / own.tokens)

    def _bleu(self, state: TrainState, direction: DataConfig, count: int) -> float:
        pairs = [pair for pair, _ in zip(read_pairs(direction, "valid"), range(count), strict=False)]
        tags = [self.corpus.tokenizer.tags(self.config.data, direction.target_lang)] * len(pairs)
        alpha = self.alpha(state.clock)
        results = self.translator.translate(state.eval_params, alpha, [source for source, _ in pairs], tags=tags)
        return corpus_bleu([nbest[0].text for nbest in results], [ref for _, ref in pairs], direction.target_lang)


def per_token(sums: Sequence[LossSums]) -> dict[str, Any]:
    """Returns the loss and the nll per target token over all validation sets together, in nats."""
    tokens = sum(part.tokens for part in sums)
    return {name: sum(getattr(part, name) for part in sums) / tokens for name in ("loss", "nll")}
