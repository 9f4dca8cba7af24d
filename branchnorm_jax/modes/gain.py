"""Finds pairs whose target translates another source, with a trained model."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from branchnorm_jax.data.formats import Pair
from branchnorm_jax.errors import UserError
from branchnorm_jax.modes.common import load
from branchnorm_jax.options import Config, DataConfig
from branchnorm_jax.training.trained import find_run

CONTRASTS = 2
"""Number of other sources that a source is compared with."""


class SourceGain:
    """A filter, used like those of OpusFilter, that rejects pairs with a source gain below `clean.min_gain`.

    The source gain of a pair is log P(target | source) minus the mean of log P(target | other source) over the sources
    of `CONTRASTS` other pairs, in nats per target token. A source that has nothing to do with its target gains nothing.
    Pairs that are longer than the learned positions of the model have no source gain, and are kept.
    """

    def __init__(self, config: Config, data: DataConfig) -> None:
        """Loads the model of `clean.score_with`; `data` has the languages of the pairs.

        Raises:
          UserError: if the run does not exist or does not translate between these languages.
        """
        theirs, workdir, which = find_run("clean.score_with", config.clean.score_with, config)
        directions = [direction.pair for direction in theirs.data.directions()]
        if data.pair not in directions:
            raise UserError(f"clean.score_with: {workdir.path} translates {', '.join(directions)}, not {data.pair}")
        decode = dataclasses.replace(theirs.decode, checkpoint=which, ensemble="", glossary="")
        self.trained = load(dataclasses.replace(theirs, decode=decode), workdir)
        self.tags = self.trained.translator.tokenizer.tags(theirs.data, data.source_lang, data.target_lang)
        self.minimum = config.clean.min_gain

    def decisions(self, pairs: Sequence[Pair]) -> list[bool]:
        """Returns which pairs to keep: all that cannot be compared, because there are too few, or they are too long."""
        fits = np.array(self.trained.translator.fits(pairs, [self.tags] * len(pairs)), bool)
        scored = [pair for pair, fit in zip(pairs, fits, strict=True) if fit]
        kept = np.full(len(pairs), True)
        if len(scored) > CONTRASTS:
            kept[fits] = self.gains(scored) >= self.minimum
        return kept.tolist()

    def gains(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Returns the source gain of each pair, float64 [n]."""
        sources, targets = zip(*pairs, strict=True)
        log_probs = []
        for part in range(1 + CONTRASTS):
            # Neighbours often have the same source, or one about the same.
            shift = part * len(sources) // (1 + CONTRASTS)
            mixed = list(zip((*sources[shift:], *sources[:shift]), targets, strict=True))
            scored = self.trained.translator.score(
                self.trained.params, self.trained.alpha, mixed, [self.tags] * len(mixed)
            )
            log_probs.append([log_prob for log_prob, _ in scored])
        own, *others = np.array(log_probs)
        return (own - np.mean(others, axis=0)) / np.array([tokens for _, tokens in scored])
