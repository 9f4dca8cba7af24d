"""Generation of text by a language model: the search of `beam.py` without a source.

One pass of the model reads the prompts of a batch, as in training, and fills the cache. The search begins after them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding import beam
from branchnorm_jax.decoding.beam import Given, Hypotheses
from branchnorm_jax.decoding.engine import column, pad, padded_length, prepared, rounded, scorer
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.incremental import prefill, start_cache
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig
from branchnorm_jax.tokens import EOS, PAD


class Continuation(NamedTuple):
    """A continuation of a prompt."""

    text: str
    log_prob: float
    """Natural log-probability, the prompt excluded; with the end of the document, if it has `ended`."""
    tokens: tuple[int, ...]
    """Token ids, without the end of the document."""
    ended: bool
    """Whether the model ended the document. Otherwise its length reached the limit."""


@dataclasses.dataclass(frozen=True)
class Generator:
    """Continues prompts by beam search or sampling.

    Attributes:
      model: a language model.
      tokenizer: its vocabulary.
      config: options of the search.
      context: the longest text in tokens, prompt included.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: DecodeConfig
    context: int

    @property
    def room(self) -> int:
        """Maximum number of tokens of a prompt that are read: half of the context."""
        return max(1, self.context // 2)

    def cut(self, prompt: str) -> bool:
        """Returns whether a prompt is longer than `room`, so that only its end is read."""
        return len(self.encode(prompt)) > self.room

    def encode(self, prompt: str) -> list[int]:
        """Returns the token ids of a prompt, without EOS."""
        return self.tokenizer.encode_target([prompt])[0][:-1]

    def generate(
        self, params: Params, alpha: Alpha, prompts: Sequence[str], first: int = 0
    ) -> list[list[Continuation]]:
        """Returns the `decode.nbest` best continuations of each prompt, or fewer if the search found fewer.

        Args:
          params: the parameters.
          alpha: alpha_t.
          prompts: the prompts. An empty one begins a document. Of one that does not fit into the context, the end is
            read; see `cut`.
          first: number of the first prompt, which seeds its samples.
        """
        encoded = [self.encode(prompt)[-self.room :] for prompt in prompts]
        ends = [min(len(ids) + self.config.max_new_tokens, self.context - 1) for ids in encoded]
        length = min(self.context, padded_length(max(ends, default=0) + 1))
        rows = max(1, self.config.batch_tokens // (length * self.config.beam_size))
        new = sum(ends) - sum(map(len, encoded))
        # Few tokens do not earn back the time that the programs of an unrolled decoder take to compile.
        params = prepared(self.config, self.model, params, new, min(rows, len(prompts)), unrolled=0)
        found: list[list[Continuation]] = []
        for begin in range(0, len(prompts), rows):
            part = slice(begin, begin + rows)
            count = min(rows, rounded(len(encoded[part])))
            found += self._continued(params, alpha, encoded[part], ends[part], (count, length), first + begin)
        return found

    def _continued(
        self,
        params: Params,
        alpha: Alpha,
        encoded: Sequence[list[int]],
        ends: Sequence[int],
        shape: tuple[int, int],
        first: int,
    ) -> list[list[Continuation]]:
        """Continues prompts that are searched at once, each to at most its entry of `ends`.

        `shape` is the number of rows and their length; rows without a prompt are empty.
        """
        rows, length = shape
        longest = max(map(len, encoded))
        size = min(padded_length(longest), length) if longest else 0
        inputs = np.full((rows, size), PAD, np.int32)
        for row, ids in enumerate(encoded):
            inputs[row, size - len(ids) :] = [EOS, *ids][:-1]
        numbers = np.arange(first, first + rows, dtype=np.int32)
        given = Given(column(ends, rows), numbers, prompt=pad(encoded, rows, size, filling=-1), may_be_cut=True)
        found: Hypotheses = jax.device_get(self._search(length)(params, alpha, inputs, given))
        return [
            [
                self._continuation(found, row, rank, len(ids), ends[row])
                for rank in range(self.config.nbest)
                if found.scores[row, rank] != -np.inf  # an unused place of the beam
            ]
            for row, ids in enumerate(encoded)
        ]

    def _continuation(self, found: Hypotheses, row: int, rank: int, start: int, limit: int) -> Continuation:
        tokens = found.tokens[row, rank].tolist()
        end = tokens.index(EOS) if EOS in tokens else len(tokens)
        ended = end < limit  # At the limit, the search puts EOS, whatever its probability is.
        log_prob = float(found.token_log_probs[row, rank, start : end + ended].sum(dtype=np.float64))
        return Continuation(self.tokenizer.text(tokens[start:end]), log_prob, tuple(tokens[start:end]), ended)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a generator lives as long as its programs
    def _search(self, length: int) -> Callable[..., Hypotheses]:
        """Returns the search for texts of up to `length` tokens, the end of the document included."""
        model, config = self.model, self.config

        @jax.jit
        def search(params: Params, alpha: Alpha, inputs: jax.Array, given: Given) -> Hypotheses:
            rows, k = len(inputs), config.beam_size
            caches = start_cache(model, params, jnp.zeros((rows, 1, 1)), length * k)
            if inputs.size:
                caches = prefill(model, params, caches, inputs, k, alpha)
            empty = beam.empty_search(caches, rows, k, length, length)
            start = beam.begin(empty, jnp.arange(rows), given, config)
            step = scorer(model, params, alpha, length)
            return beam.ranked(beam.run(step, start, config, jnp.int32(rows)))

        return search
