"""Lines in, lines out: batching, beam search and detokenisation around a model."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.data.tokenizer import NO_TAGS, Tags, Tokenizer
from branchnorm_jax.decoding.beam import Hypotheses
from branchnorm_jax.decoding.engine import Engine, Weights, pad, padded_length
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.places import decoder_inputs
from branchnorm_jax.model.transformer import BranchScale, Transformer
from branchnorm_jax.options import EOS, DecodeConfig, ModelConfig


def make_model(config: ModelConfig, tokenizer: Tokenizer) -> Transformer:
    """The network of a config for a vocabulary."""
    unused = tokenizer.unused_target if config.mask_unused else ()
    return Transformer(config, tokenizer.source_size, tokenizer.target_size, unused, len(tokenizer.languages))


class Translation(NamedTuple):
    """One hypothesis: text, score (log-probability over length penalty) and log-probability (natural, with EOS)."""

    text: str
    score: float
    log_prob: float
    pieces: tuple[tuple[str, float], ...] = ()
    """Its tokens and their log-probabilities, EOS last."""


class Member(NamedTuple):
    """A model of an ensemble."""

    model: Transformer
    params: Params
    branch_scale: BranchScale


@dataclasses.dataclass(frozen=True)
class Translator:
    """Translates and scores with a model whose parameters are given at each call, so that nothing compiles twice.

    Attributes:
      model: the network.
      tokenizer: its vocabulary.
      config: the options of decoding.
      warn: receives one line for each input that had to be cut.
      others: models of the same vocabulary that vote with it.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: DecodeConfig
    warn: Callable[[str], None] = lambda line: None
    others: tuple[Member, ...] = ()

    def translate(
        self,
        params: Params,
        branch_scale: BranchScale,
        lines: Sequence[str],
        first_line: int = 1,
        progress: Callable[[int], Any] = lambda done: None,
        prefixes: Sequence[str] | None = None,
        tags: Sequence[Tags] | None = None,
    ) -> list[list[Translation]]:
        """The `nbest` translations of each line, in input order; of an empty line, empty ones.

        Lines are decoded in order of length, `decode.batch_tokens` source positions x beam at a time. A line of more
        than `decode.max_input_length` tokens is cut with a warning that names it.

        Args:
          params: the model's parameters.
          branch_scale: alpha_t of the checkpoint.
          lines: source text.
          first_line: number of the first line, for warnings and for what is drawn.
          progress: called with the number of lines that were finished.
          prefixes: what the translation of each line begins with.
          tags: what asks for the language of each line's translation, where there are several.
        """
        limit, tags = self.config.max_input_length, tags or [NO_TAGS] * len(lines)
        sources = self.tokenizer.encode_source(list(lines))
        for index, ids in enumerate(sources):
            if len(ids) > limit:
                self.warn(f"line {first_line + index}: cut from {len(ids)} to {limit} tokens")
                sources[index] = [*ids[: limit - 1], EOS]
        results = [[Translation("", 0.0, 0.0)] * self.config.nbest for _ in lines]
        begins = [ids[:-1] for ids in self.tokenizer.encode_target(list(prefixes))] if prefixes else [[]] * len(lines)
        # Of only EOS, nothing is to be translated.
        asked = [index for index, ids in enumerate(sources) if len(ids) > 1 or begins[index]]
        sources = [[*tag.source, *ids] for tag, ids in zip(tags, sources, strict=True)]
        begins = [[*tag.target, *ids] for tag, ids in zip(tags, begins, strict=True)]
        progress(len(lines) - len(asked))
        for place, found in self.engine.search(
            self._weights(params, branch_scale),
            [sources[index] for index in asked],
            [first_line + index for index in asked],
            [begins[index] for index in asked],
        ):
            index = asked[place]
            results[index] = [self._translation(found, rank) for rank in range(self.config.nbest)]
            if results[index][0].score == -math.inf:
                self.warn(f"line {first_line + index}: no translation was found that begins as asked")
            progress(1)
        return results

    def _translation(self, found: Hypotheses, rank: int) -> Translation:
        """The hypothesis of this rank, of those of one sentence."""
        tokens = found.tokens[rank].tolist()
        length = tokens.index(EOS) + 1 if EOS in tokens else 0
        pieces = self.tokenizer.target_pieces_of(tokens[:length])
        each = found.token_log_probs[rank, :length].tolist()
        return Translation(
            self.tokenizer.decode_target(tokens),
            float(found.scores[rank]),
            float(found.log_probs[rank]),
            tuple(zip(pieces, each, strict=True)),
        )

    def score(
        self,
        params: Params,
        branch_scale: BranchScale,
        pairs: Sequence[tuple[str, str]],
        tags: Sequence[Tags] | None = None,
    ) -> list[tuple[float, int]]:
        """(natural log-probability of the target given the source, target tokens) of each pair, both with EOS.

        A tag before the target is a token of it.
        """
        sources, targets = self.encode(pairs, tags or [NO_TAGS] * len(pairs))
        found = self.token_log_probs(params, branch_scale, sources, targets)
        return [(float(each.sum(dtype=np.float64)), len(each)) for each in found]

    def encode(self, pairs: Sequence[tuple[str, str]], tags: Sequence[Tags]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the sources and the targets, with their tags and EOS."""
        sources = self.tokenizer.encode_source([source for source, _ in pairs])
        targets = self.tokenizer.encode_target([target for _, target in pairs])
        return (
            [[*tag.source, *ids] for tag, ids in zip(tags, sources, strict=True)],
            [[*tag.target, *ids] for tag, ids in zip(tags, targets, strict=True)],
        )

    def token_log_probs(
        self,
        params: Params,
        branch_scale: BranchScale,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """Natural log-probability of each token of each target given its source; token ids that end in EOS."""
        results = [np.zeros(0)] * len(sources)
        longer = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        for indices, length, rows in self._batches(longer):
            batch = [pad([side[index] for index in indices], rows, length) for side in (sources, targets)]
            log_probs = jax.device_get(self._forced(self._weights(params, branch_scale), *batch))
            for row, index in enumerate(indices):
                results[index] = log_probs[row, : len(targets[index])]
        return results

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """(indices, padded length, padded rows) of batches that cover all sentences."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        while order:
            length = padded_length(lengths[order[-1]])
            rows = max(1, self.config.batch_tokens // length)
            same = [index for index in order[-rows:] if padded_length(lengths[index]) == length]
            del order[-len(same) :]
            # One line by itself (interactive use) is not worth a full batch.
            yield same, length, 1 if len(same) == 1 else rows

    @functools.cached_property
    def engine(self) -> Engine:
        """What searches."""
        return Engine((self.model, *(other.model for other in self.others)), self.config)

    def _weights(self, params: Params, branch_scale: BranchScale) -> Weights:
        return (params, branch_scale), *((other.params, other.branch_scale) for other in self.others)

    @functools.cached_property
    def _forced(self) -> Callable[[Weights, np.ndarray, np.ndarray], jax.Array]:
        models = self.engine.models

        @jax.jit
        def forced(weights: Weights, source: jax.Array, target: jax.Array) -> jax.Array:
            each = []
            for model, (params, branch_scale) in zip(models, weights, strict=True):
                logits = model(params, source, decoder_inputs(target), branch_scale)
                each.append(-model.output(params).nll(logits, target)[0])
            return jax.nn.logsumexp(jnp.stack(each), axis=0) - jnp.log(len(each))

        return forced
