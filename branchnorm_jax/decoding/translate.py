"""Translation, scoring and attention of text lines: tokenisation, batching, search and detokenisation."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.data.tokenizer import NO_TAGS, Tags, Tokenizer
from branchnorm_jax.decoding.beam import Hypotheses
from branchnorm_jax.decoding.engine import Engine, Query, Weights, coarse, pad, padded_length, padded_lengths, rounded
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig
from branchnorm_jax.tokens import EOS


class Translation(NamedTuple):
    """One translation of a sentence, without language tags."""

    text: str
    score: float
    """Log-probability divided by the length penalty."""
    log_prob: float
    """Natural log-probability, EOS included."""
    pieces: tuple[tuple[str, float], ...] = ()
    """Pieces and their log-probabilities, EOS last."""
    tokens: tuple[int, ...] = ()
    """Token ids of the pieces."""
    attention: np.ndarray | None = None
    """Attention weights, float32 [target tokens, source tokens]; None unless requested."""


class Sentence(NamedTuple):
    """A line to translate."""

    source: Sequence[int]
    """Token ids, EOS last."""
    number: int
    """Line number; seeds the samples of this sentence."""
    tags: Tags = NO_TAGS
    """Tags that select the target language of a multilingual model."""
    prefix: Sequence[int] = ()
    """Token ids that the translation starts with, without EOS."""
    nbest: int = 1
    """Number of translations requested."""


class Member(NamedTuple):
    """A further model of an ensemble, with its parameters."""

    model: Transformer
    params: Params
    alpha: Alpha


@dataclasses.dataclass(frozen=True)
class Translator:
    """Translates and scores text.

    Parameters are arguments of each call, so new parameters do not cause a recompilation.

    Attributes:
      model: the network.
      tokenizer: its vocabulary.
      config: decoding options.
      warn: called with one line per warning, such as a truncated input.
      others: the other models of an ensemble; they share the vocabulary.
      rounding: see `Engine`.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: DecodeConfig
    warn: Callable[[str], None] = lambda line: None
    others: tuple[Member, ...] = ()
    rounding: Callable[[int], int] = rounded

    def translate(
        self,
        params: Params,
        alpha: Alpha,
        lines: Sequence[str],
        first_line: int = 1,
        progress: Callable[[int], Any] = lambda done: None,
        prefixes: Sequence[str] | None = None,
        tags: Sequence[Tags] | None = None,
        attention: bool = False,
    ) -> list[list[Translation]]:
        """Returns the `nbest` translations of each line, in input order.

        An empty line has empty translations. Lines are decoded in order of length, in batches of `decode.batch_tokens`
        source positions x beam size. A line of more than `decode.max_input_length` tokens is truncated, with a warning
        that names it.

        Args:
          params: the model's parameters.
          alpha: alpha_t of the checkpoint.
          lines: source text.
          first_line: number of the first line, used in warnings and to seed samples.
          progress: called with the number of lines that have been finished since the last call.
          prefixes: text that the translation of each line starts with.
          tags: tags that select the target language of each line, for a multilingual model.
          attention: whether to compute attention weights.
        """
        sources, cut = self.sources(lines)
        for index, warning in cut.items():
            self.warn(f"line {first_line + index}: {warning}")
        prefix_ids = (
            [ids[:-1] for ids in self.tokenizer.encode_target(list(prefixes))] if prefixes else [[]] * len(lines)
        )
        sentences = [
            Sentence(source, number, tag, prefix, self.config.nbest)
            for number, (source, tag, prefix) in enumerate(
                zip(sources, tags or [NO_TAGS] * len(lines), prefix_ids, strict=True), start=first_line
            )
        ]
        results = self.search(params, alpha, sentences, progress)
        for sentence, translations in zip(sentences, results, strict=True):
            if translations[0].score == -math.inf:
                suffix = " that starts with the given prefix" if sentence.prefix else ""
                self.warn(f"line {sentence.number}: no translation was found{suffix}")
        return self.with_attention(params, alpha, sentences, results) if attention else results

    def sources(self, lines: Sequence[str]) -> tuple[list[list[int]], dict[int, str]]:
        """Tokenises source lines, truncating long ones.

        Returns token ids with EOS, and a warning for each truncated line, by index.
        """
        # A language tag may come on top.
        limit, cut = min(self.config.max_input_length, (self.engine.longest or sys.maxsize) - 1), {}
        sources = self.tokenizer.encode_source(list(lines))
        for index, ids in enumerate(sources):
            if len(ids) > limit:
                cut[index] = f"cut from {len(ids)} to {limit} tokens"
                sources[index] = [*ids[: limit - 1], EOS]
        return sources, cut

    def search(
        self,
        params: Params,
        alpha: Alpha,
        sentences: Sequence[Sentence],
        progress: Callable[[int], Any] = lambda done: None,
    ) -> list[list[Translation]]:
        """Translates tokenised sentences; see `translate`.

        Gives no warnings and computes no attention weights.
        """
        results = [[Translation("", 0.0, 0.0)] * sentence.nbest for sentence in sentences]
        # A source of only EOS without a prefix is not searched; its translation is empty.
        indices = [index for index, each in enumerate(sentences) if len(each.source) > 1 or each.prefix]
        self._check_lengths([*sentence.tags.target, *sentence.prefix, EOS] for sentence in sentences)
        progress(len(sentences) - len(indices))
        queries = [
            Query([*tags.source, *source], number, [*tags.target, *prefix], nbest, len(tags.target))
            for source, number, tags, prefix, nbest in map(sentences.__getitem__, indices)
        ]
        for index, hypotheses in self.engine.search(self._weights(params, alpha), queries):
            sentence, start = sentences[indices[index]], len(sentences[indices[index]].tags.target)
            results[indices[index]] = [self._translation(hypotheses, rank, start) for rank in range(sentence.nbest)]
            progress(1)
        return results

    def with_attention(
        self,
        params: Params,
        alpha: Alpha,
        sentences: Sequence[Sentence],
        translations: Sequence[Sequence[Translation]],
    ) -> list[list[Translation]]:
        """Adds attention weights to the translations of each sentence.

        Weights from and to language tags are excluded.
        """
        pairs = zip(sentences, translations, strict=True)
        flat = [
            (sentence.tags, sentence.source, translation.tokens) for sentence, each in pairs for translation in each
        ]
        token_ids = [[*tag.source, *source] for tag, source, _ in flat], [[*tag.target, *ids] for tag, _, ids in flat]
        maps = zip(self.attention(params, alpha, *token_ids), flat, strict=True)
        weights = (whole[len(tag.target) :, len(tag.source) :] for whole, (tag, _, _) in maps)
        return [[translation._replace(attention=next(weights)) for translation in each] for each in translations]

    def _translation(self, hypotheses: Hypotheses, rank: int, start: int) -> Translation:
        """Converts the hypothesis of a rank to text.

        `start` is the number of tags at its beginning.
        """
        tokens = hypotheses.tokens[rank].tolist()
        length = tokens.index(EOS) + 1 if EOS in tokens else start
        pieces = self.tokenizer.target_pieces_of(tokens[start:length])
        log_probs = hypotheses.token_log_probs[rank, start:length].tolist()
        return Translation(
            self.tokenizer.decode_target(tokens),
            float(hypotheses.scores[rank]),
            float(hypotheses.log_probs[rank]),
            tuple(zip(pieces, log_probs, strict=True)),
            tuple(tokens[start:length]),
        )

    def warm_up(self, params: Params, alpha: Alpha, longest: int, tags: Tags = NO_TAGS) -> None:
        """Compiles the programs for lines of up to `longest` tokens, with these tags."""
        weights = self._weights(params, alpha)
        self.engine.warm_up(weights, longest + len(tags.source), len(tags.target))
        for length in padded_lengths(longest + max(map(len, tags))):
            full = max(1, self.config.batch_tokens // length)
            for rows in {min(full, coarse(count)) for count in range(1, full + 1)}:
                self._attention(weights, *[pad([], rows, length)] * 2)

    def score(
        self,
        params: Params,
        alpha: Alpha,
        pairs: Sequence[tuple[str, str]],
        tags: Sequence[Tags] | None = None,
    ) -> list[tuple[float, int]]:
        """Returns (log-probability, number of tokens) of each target given its source.

        Log-probabilities are natural logarithms. Both numbers include EOS, but no language tag.
        """
        tags = tags or [NO_TAGS] * len(pairs)
        each = self.token_log_probs(params, alpha, *self.encode(pairs, tags))
        words = [log_probs[len(tag.target) :] for log_probs, tag in zip(each, tags, strict=True)]
        return [(float(log_probs.sum(dtype=np.float64)), len(log_probs)) for log_probs in words]

    def encode(self, pairs: Sequence[tuple[str, str]], tags: Sequence[Tags]) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the token ids of sources and targets, with their tags and EOS."""
        sources = self.tokenizer.encode_source([source for source, _ in pairs])
        targets = self.tokenizer.encode_target([target for _, target in pairs])
        return (
            [[*tag.source, *ids] for tag, ids in zip(tags, sources, strict=True)],
            [[*tag.target, *ids] for tag, ids in zip(tags, targets, strict=True)],
        )

    def token_log_probs(
        self,
        params: Params,
        alpha: Alpha,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """Returns the natural log-probability of each target token given its source.

        `sources` and `targets` are token ids that end in EOS.
        """
        return self._by_target(self._forced, self._weights(params, alpha), sources, targets)

    def attention(
        self,
        params: Params,
        alpha: Alpha,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """Returns the attention weights of each pair, [target tokens, source tokens].

        Weights are float32, and each row sums to 1. A row is the cross-attention of the position that predicts the
        target token. Weights are averaged over heads, over the models of the ensemble, and over layers unless
        `decode.alignment_layer` selects one. `sources` and `targets` are token ids that end in EOS; a target may be
        empty.
        """
        attention = self._by_target(self._attention, self._weights(params, alpha), sources, targets)
        return [each[:, : len(source)] for each, source in zip(attention, sources, strict=True)]

    def _by_target(
        self,
        program: Callable[[Weights, np.ndarray, np.ndarray], jax.Array],
        weights: Weights,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """Runs a program in batches; returns its result for each pair, with one entry per target token.

        The program takes weights, sources [B, T] and targets [B, T].
        """
        self._check_lengths([*sources, *targets])
        results = [np.zeros(0)] * len(sources)
        longer = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        for indices, length, rows in self._batches(longer):
            batch = [pad([side[index] for index in indices], rows, length) for side in (sources, targets)]
            outputs = jax.device_get(program(weights, *batch))
            for row, index in enumerate(indices):
                results[index] = outputs[row, : len(targets[index])]
        return results

    def _check_lengths(self, sentences: Iterable[Sequence[int]]) -> None:
        """Raises `UserError` if a sentence is longer than the learned positions."""
        length, longest = max(map(len, sentences), default=0), self.engine.longest
        if longest and length > longest:
            raise UserError(
                f"a sentence of {length} tokens is longer than the {longest} positions of the model "
                "(model.max_positions); split it"
            )

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """Yields (indices, padded length, padded rows) of batches of all sentences."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        while order:
            length = padded_length(lengths[order[-1]])
            rows = max(1, self.config.batch_tokens // length)
            same = [index for index in order[-rows:] if padded_length(lengths[index]) == length]
            del order[-len(same) :]
            # A batch of few lines, as in interactive use, gets fewer rows.
            yield same, length, min(rows, coarse(len(same)))

    @functools.cached_property
    def engine(self) -> Engine:
        """The search engine of all models."""
        return Engine((self.model, *(other.model for other in self.others)), self.config, self.rounding)

    def _weights(self, params: Params, alpha: Alpha) -> Weights:
        return (params, alpha), *((other.params, other.alpha) for other in self.others)

    @functools.cached_property
    def _forced(self) -> Callable[[Weights, np.ndarray, np.ndarray], jax.Array]:
        models = self.engine.models

        @jax.jit
        def log_probs(weights: Weights, source: jax.Array, target: jax.Array) -> jax.Array:
            each = []
            for model, (params, alpha) in zip(models, weights, strict=True):
                logits = model(params, source, decoder_inputs(target), alpha)
                each.append(-model.output(params).nll(logits, target)[0])
            return jax.nn.logsumexp(jnp.stack(each), axis=0) - jnp.log(len(each))

        return log_probs

    @functools.cached_property
    def _attention(self) -> Callable[[Weights, np.ndarray, np.ndarray], jax.Array]:
        models, layer = self.engine.models, self.config.alignment_layer

        @jax.jit
        def attention(weights: Weights, source: jax.Array, target: jax.Array) -> jax.Array:
            each = []
            for model, (params, alpha) in zip(models, weights, strict=True):
                depth = model.config.decoder_layers
                weights_M = jnp.arange(1, depth + 1) == layer if layer else jnp.full(depth, 1 / depth)
                inputs = decoder_inputs(target)
                each.append(model.attention(params, source, inputs, alpha, weights_M.astype(jnp.float32)))
            return jnp.stack(each).mean(0)

        return attention


def pharaoh(attention: np.ndarray) -> list[tuple[int, int]]:
    """Returns alignment points (i, j) from attention weights.

    Source token i has the largest weight for target token j, as with fairseq's `--print-alignment`. Indices count from
    0, and EOS is excluded on both sides. The first of several largest weights counts.

    Args:
      attention: weights as returned by `Translator.attention`.
    """
    inner = attention[:-1, :-1]
    return [(int(row.argmax()), j) for j, row in enumerate(inner)] if inner.size else []
