"""Validation of a state: the loss on the validation sets, the BLEU score of translations, and the source gain."""

import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from branchnorm_jax.data.batches import BatchPlan
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.prepare import Corpus
from branchnorm_jax.data.texts import TextRows
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.evaluation.bleu import Measure, corpus_scores
from branchnorm_jax.evaluation.comet import load_comet
from branchnorm_jax.model import growth
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.losses import LossSums
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DataConfig
from branchnorm_jax.parallel import hosts
from branchnorm_jax.parallel.mesh import local_copy, local_mesh
from branchnorm_jax.parallel.rows import Rows
from branchnorm_jax.training.state import Batch, TrainState
from branchnorm_jax.training.step import make_eval_step

SOURCE_GAIN_SENTENCES = 128
"""Number of validation sentences for `source_gain`."""


class Validator:
    """Validates states of one run."""

    def __init__(
        self, config: Config, model: Transformer, rows: Rows, corpus: Corpus, plans: Sequence[BatchPlan]
    ) -> None:
        """Prepares validation. `plans` has one batch plan for each direction in `corpus.validated`."""
        self.config, self.rows, self.corpus, self.plans = config, rows, corpus, plans
        self.translator = Translator(model, corpus.tokenizer, config.decode, data=config.data)
        self.comet: list[Measure] = []
        if config.train.best_metric == "comet":
            load = functools.partial(load_comet, config.evaluate.comet)
            self.comet = hosts.first_then_others(lambda: [load()], list, "which loads COMET")
        self.alpha = jax.jit(growth.alpha(config.model))
        self.eval_step = jax.jit(make_eval_step(model, config))

    def losses(self, state: TrainState, heed: Callable[[], Any]) -> dict[str, LossSums]:
        """Returns the loss sums of each validation set, by language pair. Calls `heed`, which may raise, per batch."""
        directions = zip(self.corpus.validated, self.plans, strict=True)
        return {direction.pair: self._loss_sums(state, plan, heed) for direction, plan in directions}

    def source_gain(self, state: TrainState) -> float:
        """Returns the mean of `_source_gain` over the validation sets, in nats per target token."""
        return statistics.mean(self._source_gain(state, plan) for plan in self.plans)

    def bits_per_byte(self, sums: Mapping[str, LossSums]) -> float:
        """Returns the bits that the model needs for a byte of the validation text: nll / (ln 2 x bytes)."""
        texts = sum(rows.store.bytes for rows in self.corpus.valid if isinstance(rows, TextRows))
        return float(sum(part.nll for part in sums.values())) / (math.log(2) * texts)

    def scores(self, state: TrainState, count: int, heed: Callable[[], Any]) -> dict[str, dict[str, float]]:
        """Returns BLEU and chrF of the first `count` sentences of each validation set, by language pair.

        With `train.best_metric=comet`, the first process also computes COMET.

        Each process translates its share of the sentences on its first device, which needs one whole copy of the
        parameters, and a second one of the decoder's if its layers are not a loop (`decode.unroll`). All processes
        return the same values. Calls `heed`, which may raise, after every sentence.
        """
        params, alpha = local_copy(self.rows.mesh, (state.eval_params, self.alpha(state.clock)))
        with jax.set_mesh(local_mesh(self.rows.mesh)):
            return {d.pair: self._scores(params, alpha, d, count, heed) for d in self.corpus.validated}

    def _loss_sums(self, state: TrainState, plan: BatchPlan, heed: Callable[[], Any]) -> LossSums:
        sums: list[LossSums] = []
        for own in plan.in_order(self.rows.indices):
            heed()
            sums.append(self.eval_step(state, Batch(*self.rows.put(own))))
            jax.block_until_ready(sums[-2:][0])  # One batch ahead of the device, not all.
        return jax.tree.map(lambda *parts: float(sum(parts)), *jax.device_get(sums))

    def _source_gain(self, state: TrainState, plan: BatchPlan) -> float:
        """Returns the nll with shuffled sources minus the nll with the correct sources, in nats per target token.

        The source gain is 0 if the model does not use the source.
        """
        multiple = self.config.data.row_multiple
        batch = plan.single(max(SOURCE_GAIN_SENTENCES // multiple, 1) * multiple)
        shuffled = batch._replace(source=np.roll(batch.source, 1, axis=0))
        own, other = (self.eval_step(state, Batch(*self.rows.put(self.rows.take(text)))) for text in (batch, shuffled))
        return float((other.nll - own.nll) / own.tokens)

    def _scores(
        self, params: Params, alpha: Alpha, direction: DataConfig, count: int, heed: Callable[[], Any]
    ) -> dict[str, float]:
        pairs = [pair for pair, _ in zip(read_pairs(direction, "valid"), range(count), strict=False)]
        share = [source for source, _ in pairs][jax.process_index() :: jax.process_count()]
        tags = self.corpus.tokenizer.tags(self.config.data, direction.source_lang, direction.target_lang)
        results = self.translator.translate(
            params, alpha, share, progress=lambda done: heed(), tags=[tags] * len(share)
        )
        shares = hosts.gather(json.dumps([nbest[0].text for nbest in results]), "which translates")
        hypotheses = [""] * len(pairs)
        for process, texts in enumerate(shares):
            hypotheses[process :: len(shares)] = json.loads(texts)
        sources, references = zip(*pairs, strict=True)
        scores = corpus_scores(hypotheses, references, direction.target_lang)
        if self.config.train.best_metric != "comet":
            return scores
        found = [score for measure in self.comet for score in measure(sources, hypotheses, references)]
        shared = hosts.gather(json.dumps({score.name: score.score for score in found}), "which computes COMET")[0]
        return scores | json.loads(shared)


def per_token(sums: Sequence[LossSums]) -> dict[str, Any]:
    """Returns the loss and the nll per target token over all validation sets together, in nats."""
    tokens = sum(part.tokens for part in sums)
    return {name: sum(getattr(part, name) for part in sums) / tokens for name in ("loss", "nll")}
