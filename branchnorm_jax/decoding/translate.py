"""Lines in, lines out: batching, beam search and detokenisation around a model."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.beam import Hypotheses, beam_search
from branchnorm_jax.model.blocks import Cache
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import BranchScale, Transformer, source_mask
from branchnorm_jax.options import EOS, PAD, DecodeConfig, ModelConfig

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Source lengths that batches are padded to, so that few shapes are compiled; beyond, multiples of 512."""


def make_model(config: ModelConfig, tokenizer: Tokenizer) -> Transformer:
    """The network of a config for a vocabulary."""
    unused = tokenizer.unused_target if config.mask_unused else ()
    return Transformer(config, tokenizer.source_size, tokenizer.target_size, unused)


class Translation(NamedTuple):
    """One hypothesis: text, score (log-probability over length penalty) and log-probability (natural, with EOS)."""

    text: str
    score: float
    log_prob: float


def padded_length(length: int) -> int:
    """The smallest of `LENGTHS` that holds `length` tokens."""
    return next((bucket for bucket in LENGTHS if bucket >= length), -(-length // 512) * 512)


def pad(sentences: Sequence[Sequence[int]], rows: int, length: int) -> np.ndarray:
    """int32 [rows, length] of token ids, filled up with padding."""
    out = np.full((rows, length), PAD, np.int32)
    for row, ids in enumerate(sentences):
        out[row, : len(ids)] = ids
    return out


@dataclasses.dataclass(frozen=True)
class Translator:
    """Translates and scores with a model whose parameters are given at each call, so that nothing compiles twice.

    Attributes:
      model: the network.
      tokenizer: its vocabulary.
      config: the options of decoding.
      warn: receives one line for each input that had to be cut.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: DecodeConfig
    warn: Callable[[str], None] = lambda line: None

    def translate(
        self,
        params: Params,
        branch_scale: BranchScale,
        lines: Sequence[str],
        first_line: int = 1,
        progress: Callable[[int], Any] = lambda done: None,
    ) -> list[list[Translation]]:
        """The `nbest` translations of each line, in input order; of an empty line, empty ones.

        Lines are decoded in order of length, in batches of `decode.batch_tokens` source positions x beam. A line of
        more than `decode.max_input_length` tokens is cut with a warning that names it.

        Args:
          params: the model's parameters.
          branch_scale: alpha_t of the checkpoint.
          lines: source text.
          first_line: number of the first line, for warnings.
          progress: called with the number of lines that a batch finished.
        """
        limit = self.config.max_input_length
        sources = self.tokenizer.encode_source(list(lines))
        for index, ids in enumerate(sources):
            if len(ids) > limit:
                self.warn(f"line {first_line + index}: cut from {len(ids)} to {limit} tokens")
                sources[index] = [*ids[: limit - 1], EOS]
        results = [[Translation("", 0.0, 0.0)] * self.config.nbest for _ in lines]
        # Only EOS: nothing to translate.
        progress(sum(len(ids) <= 1 for ids in sources))
        for indices, length, rows in self._batches([len(ids) for ids in sources]):
            found = jax.device_get(
                self._search(params, branch_scale, pad([sources[index] for index in indices], rows, length))
            )
            for row, index in enumerate(indices):
                results[index] = [
                    Translation(
                        self.tokenizer.decode_target(found.tokens[row, rank].tolist()),
                        float(found.scores[row, rank]),
                        float(found.log_probs[row, rank]),
                    )
                    for rank in range(self.config.nbest)
                ]
            progress(len(indices))
        return results

    def score(
        self, params: Params, branch_scale: BranchScale, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[float, int]]:
        """(natural log-probability of the target given the source, target tokens) of each pair, both with EOS."""
        sources = self.tokenizer.encode_source([source for source, _ in pairs])
        targets = self.tokenizer.encode_target([target for _, target in pairs])
        results = [(0.0, 0)] * len(pairs)
        longer = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        for indices, length, rows in self._batches(longer, shortest=1):
            batch = [pad([side[index] for index in indices], rows, length) for side in (sources, targets)]
            log_probs = jax.device_get(self._forced(params, branch_scale, *batch))
            for row, index in enumerate(indices):
                results[index] = (float(log_probs[row]), len(targets[index]))
        return results

    def _batches(self, lengths: Sequence[int], shortest: int = 2) -> Iterator[tuple[list[int], int, int]]:
        """(indices, padded length, padded rows) of batches that cover all sentences of at least `shortest` tokens."""
        order = sorted((index for index, length in enumerate(lengths) if length >= shortest), key=lengths.__getitem__)
        while order:
            length = padded_length(lengths[order[-1]])
            rows = max(1, self.config.batch_tokens // (length * self.config.beam_size))
            same = [index for index in order[-rows:] if padded_length(lengths[index]) == length]
            del order[-len(same) :]
            # One line by itself (interactive use) is not worth a full batch.
            yield same, length, 1 if len(same) == 1 else rows

    @functools.cached_property
    def _search(self) -> Callable[[Params, BranchScale, np.ndarray], Hypotheses]:
        c, model = self.config, self.model

        @jax.jit
        def search(params: Params, branch_scale: BranchScale, source_BS: jax.Array) -> Hypotheses:
            rows, length = source_BS.shape
            capacity = int(c.max_length_a * length + c.max_length_b) + 1
            lengths_B = (source_BS != PAD).sum(1)
            # From the sentence's own length, not the padded one: the result must not depend on its neighbours.
            limits_B = jnp.floor(c.max_length_a * lengths_B + c.max_length_b).astype(jnp.int32)
            limits_B = jnp.where(lengths_B > 0, limits_B, 0)
            mask = source_mask(source_BS)
            memory = model.encode(params, source_BS, branch_scale)

            def step(cache: Cache, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
                return model.step(params, cache, mask, tokens, position, branch_scale)

            def reorder(cache: Cache, picked: jax.Array) -> Cache:
                return cache._replace(self=jax.tree.map(lambda leaf: leaf[:, picked], cache.self))

            return beam_search(
                step,
                reorder,
                model.start_cache(params, memory, rows * c.beam_size, capacity),
                limits_B,
                beam_size=c.beam_size,
                capacity=capacity,
                min_length=c.min_length,
                penalty=c.length_penalty,
                penalty_kind=c.length_penalty_kind,
            )

        return search

    @functools.cached_property
    def _forced(self) -> Callable[[Params, BranchScale, np.ndarray, np.ndarray], jax.Array]:
        @jax.jit
        def forced(params: Params, branch_scale: BranchScale, source: jax.Array, target: jax.Array) -> jax.Array:
            inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=EOS)
            nll, _ = self.model.output(params).nll(self.model(params, source, inputs, branch_scale), target)
            return -jnp.where(target != PAD, nll, 0.0).sum(1)

        return forced
