"""Translation, scoring and attention of text lines: tokenisation, batching, search and detokenisation."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.data.tokenizer import NO_TAGS, TAG, Tags, Tokenizer
from branchnorm_jax.decoding.beam import Hypotheses
from branchnorm_jax.decoding.engine import Engine, Query, Weights, coarse, pad, padded_length, padded_lengths, rounded
from branchnorm_jax.decoding.glossary import NO_TERMS, Glossary, check_writable, encode_phrase, word_starts
from branchnorm_jax.decoding.parts import Part, split
from branchnorm_jax.decoding.results import Translation, joined
from branchnorm_jax.decoding.sentences import Line, Required, Sentence
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DataConfig, DecodeConfig
from branchnorm_jax.tokens import EOS

MORE = 4
"""The smallest number of hypotheses that phrases add to a beam. It grows by powers of two, so that few are compiled."""


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
      glossary: terms of the source with the translations that they must have.
      data: what the model was trained on: its languages, and the length of its longest sentences.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: DecodeConfig
    warn: Callable[[str], None] = lambda line: None
    others: tuple[Member, ...] = ()
    rounding: Callable[[int], int] = rounded
    glossary: Glossary = NO_TERMS
    data: DataConfig = dataclasses.field(default_factory=DataConfig)

    def translate(
        self,
        params: Params,
        alpha: Alpha,
        lines: Sequence[str],
        first: tuple[str, int] = ("", 1),
        progress: Callable[[int], Any] = lambda done: None,
        required: Sequence[Required] | None = None,
        tags: Sequence[Tags] | None = None,
        attention: bool = False,
    ) -> list[list[Translation]]:
        """Returns the `nbest` translations of each line, in input order.

        An empty line has empty translations. A line of more than `limit` tokens is split, and the translations of its
        parts are joined (see `parts.split` and `results.joined`); with `decode.split=none` it is truncated, with a
        warning that names it. Lines are decoded in order of length, in batches of `decode.batch_tokens` source
        positions x beam size.

        Args:
          params: the model's parameters.
          alpha: alpha_t of the checkpoint.
          lines: source text.
          first: name of the input, for warnings, and number of the first line, which also seeds samples.
          progress: called with the number of lines that have been finished since the last call.
          required: what the translation of each line must contain, beside the terms of the glossary.
          tags: language tags of each line, for a multilingual model.
          attention: whether to compute attention weights.

        Raises:
          UserError: if the model cannot write a required prefix or phrase.
        """
        required = required or [Required()] * len(lines)
        each = zip(lines, tags or [NO_TAGS] * len(lines), required, strict=True)
        given = [
            Line(text, number, tag, needed, self.config.nbest, attention)
            for number, (text, tag, needed) in enumerate(each, start=first[1])
        ]
        results = self.translate_lines(params, alpha, given, progress)
        for line, (best, *_) in zip(given, results, strict=True):
            where = f"{first[0]}, line {line.number}" if first[0] else f"line {line.number}"
            if best.warning:
                self.warn(f"{where}: {best.warning}")
            if best.score == -math.inf:
                suffix = " that starts with the given prefix" if line.required.prefix else ""
                suffix += " that contains the required phrases" if self.phrases(line.text, line.required) else ""
                self.warn(f"{where}: no translation was found{suffix}")
        return results

    def phrases(self, text: str, required: Required) -> list[list[int]]:
        """Returns the token ids of the phrases that the translation of a text must contain.

        They are the translations of the terms of the glossary that occur in the text, and those of `required`. Raises
        `UserError` if the model cannot write one of them.
        """
        glossary = self.glossary if required.glossary is None else required.glossary
        return [self.encoded(each) for each in dict.fromkeys([*glossary.translations(text), *required.phrases])]

    def prefix(self, text: str, tags: Tags = NO_TAGS) -> list[int]:
        """Returns the token ids of the beginning of a translation, without its tags.

        Raises:
          UserError: if the model cannot write it, or has too few positions.
        """
        ids, longest = self.tokenizer.encode_target([text])[0][:-1], self.engine.longest
        check_writable(text, ids, self.model.unused)
        if longest and len(tags.target) + len(ids) >= longest:
            raise UserError(
                f"the prefix has {len(ids)} tokens, and the model has {longest} positions (model.max_positions); "
                "shorten it"
            )
        return ids

    @functools.cached_property
    def encoded(self) -> Callable[[str], list[int]]:
        """Returns a function that returns the token ids of a phrase; see `glossary.encode_phrase`."""
        return functools.lru_cache(1 << 16)(functools.partial(encode_phrase, self.tokenizer, unused=self.model.unused))

    def translate_lines(
        self,
        params: Params,
        alpha: Alpha,
        lines: Sequence[Line],
        progress: Callable[[int], Any] = lambda done: None,
    ) -> list[list[Translation]]:
        """Translates lines; see `translate`. Gives no warnings.

        A prefix is the beginning of the first part of a line. A line with required phrases is not split. Raises
        `UserError` if the model cannot write a prefix or a phrase.
        """
        parts = self.parts(lines)
        prefixes = [self.prefix(line.required.prefix, line.tags) for line in lines]
        owners = [owner for owner, each in enumerate(parts) for _ in each]
        sentences = [
            Sentence(
                part.source,
                _seed(line.number, place),
                line.tags,
                () if place else prefix,
                line.nbest,
                self.phrases(part.text, line.required),
            )
            for line, prefix, each in zip(lines, prefixes, parts, strict=True)
            for place, part in enumerate(each)
        ]
        left = [len(each) for each in parts]

        def finished(index: int) -> None:
            left[owners[index]] -= 1
            progress(int(left[owners[index]] == 0))

        results = self.search(params, alpha, sentences, finished)
        wanted = [index for index, owner in enumerate(owners) if lines[owner].attention]
        chosen = [sentences[index] for index in wanted], [results[index] for index in wanted]
        for index, attended in zip(wanted, self.with_attention(params, alpha, *chosen), strict=True):
            results[index] = attended
        in_order = iter(results)
        return [joined([next(in_order) for _ in each], each) for each in parts]

    @functools.cached_property
    def limit(self) -> int:
        """Maximum number of tokens of a line, EOS included, that is translated as a whole.

        The model was trained on sentences of at most `data.max_length` tokens, so longer lines are split, unless
        `decode.split=none`.
        """
        return self.longest if self.config.split == "none" else min(self.longest, self.data.max_length)

    @functools.cached_property
    def source_lang(self) -> str:
        """The source language, or "" if the model has several."""
        sources = self.data.sources
        return sources[0] if len(sources) == 1 else ""

    @functools.cached_property
    def longest(self) -> int:
        """Maximum number of tokens of a line, EOS included, that can be translated as a whole."""
        # A language tag may come on top.
        return min(self.config.max_input_length, (self.engine.longest or sys.maxsize) - 1)

    def parts(self, lines: Sequence[Line]) -> list[list[Part]]:
        """Tokenises lines. A line of more than `limit` tokens is split, or cut with `decode.split=none`.

        With `decode.split=sentences`, every line is split. A line with required phrases is never split, but cut,
        because nothing says which part a phrase belongs to.
        """

        def language(line: Line) -> str:
            tag = TAG.fullmatch("".join(self.tokenizer.source_pieces_of([*line.tags.source])))
            return tag[1] if tag and self.data.tags == "each" else self.source_lang

        def fitting(line: Line, ids: list[int]) -> list[Part]:
            whole = self.config.split == "none" or bool(line.required.phrases)
            limit = self.longest if whole else self.limit
            if len(ids) <= limit and (whole or self.config.split != "sentences"):
                return [Part(ids, line.text)]
            if whole:
                kept = ids[: limit - 1]
                text = self.tokenizer.source_processor.decode(kept)
                return [Part([*kept, EOS], text, warning=f"cut from {len(ids)} to {limit} tokens")]
            return split(line.text, self.tokenizer, limit, language(line))

        return list(map(fitting, lines, self.tokenizer.encode_source([line.text for line in lines])))

    def search(
        self,
        params: Params,
        alpha: Alpha,
        sentences: Sequence[Sentence],
        finished: Callable[[int], Any] = lambda index: None,
    ) -> list[list[Translation]]:
        """Translates tokenised sentences, and calls `finished` with the index of each finished sentence.

        Gives no warnings and computes no attention weights.
        """
        results = [[Translation("", 0.0, 0.0, source=(*each.source,))] * each.nbest for each in sentences]
        queries = {index: each.query for index, each in enumerate(sentences) if not each.is_empty}
        for index in range(len(sentences)):
            if index not in queries:
                finished(index)
        for engine, group in self._by_engine(queries):
            for place, hypotheses in engine.search(self._weights(params, alpha), [queries[index] for index in group]):
                index, sentence = group[place], sentences[group[place]]
                results[index] = [self._translation(hypotheses, rank, sentence) for rank in range(sentence.nbest)]
                finished(index)
        return results

    def _by_engine(self, queries: Mapping[int, Query]) -> list[tuple[Engine, list[int]]]:
        """Returns engines with the sentences that they search.

        Phrases add as many hypotheses as they have tokens, rounded up, so that each bank of `constraints` has one.
        """
        groups: dict[int, list[int]] = {}
        for index, query in queries.items():
            groups.setdefault(self._beam_size(sum(map(len, query.phrases))), []).append(index)
        return [(self._engines(beam_size), group) for beam_size, group in sorted(groups.items())]

    def _beam_size(self, tokens: int) -> int:
        """Returns the number of hypotheses of a sentence with phrases of this many tokens together."""
        return self.config.beam_size + (max(MORE, 1 << (tokens - 1).bit_length()) if tokens else 0)

    def with_attention(
        self,
        params: Params,
        alpha: Alpha,
        sentences: Sequence[Sentence],
        translations: Sequence[Sequence[Translation]],
    ) -> list[list[Translation]]:
        """Adds attention weights to the translations of each sentence.

        Weights from and to language tags are excluded. A translation without tokens has none.
        """
        pairs = zip(sentences, translations, strict=True)
        flat = [
            (sentence.tags, sentence.source, translation.tokens)
            for sentence, each in pairs
            for translation in each
            if translation.tokens
        ]
        token_ids = [[*tag.source, *source] for tag, source, _ in flat], [[*tag.target, *ids] for tag, _, ids in flat]
        maps = zip(self.attention(params, alpha, *token_ids), flat, strict=True)
        weights = (whole[len(tag.target) :, len(tag.source) :] for whole, (tag, _, _) in maps)

        def of(translation: Translation) -> np.ndarray:
            return next(weights) if translation.tokens else np.zeros((0, len(translation.source)), np.float32)

        return [[translation._replace(attention=of(translation)) for translation in each] for each in translations]

    def _translation(self, hypotheses: Hypotheses, rank: int, sentence: Sentence) -> Translation:
        """Converts the hypothesis of a rank to text, without the tags at its beginning."""
        start, tokens = len(sentence.tags.target), hypotheses.tokens[rank].tolist()
        length = tokens.index(EOS) + 1 if EOS in tokens else start
        pieces = self.tokenizer.target_pieces_of(tokens[start:length])
        log_probs = hypotheses.token_log_probs[rank, start:length].tolist()
        return Translation(
            self.tokenizer.decode_target(tokens),
            float(hypotheses.scores[rank]),
            float(hypotheses.log_probs[rank]),
            tuple(zip(pieces, log_probs, strict=True)),
            tuple(tokens[start:length]),
            tuple(sentence.source),
        )

    def programs(self, params: Params, alpha: Alpha, longest: int, tags: Tags = NO_TAGS) -> Iterator[Callable[[], Any]]:
        """Yields functions that compile the programs for lines of up to `longest` tokens, with these tags.

        They include those for lines with one term of the glossary.
        """
        weights = self._weights(params, alpha)
        sizes = {len(self.encoded(each)) for each in self.glossary.all_translations}
        searches = {(self._beam_size(size), coarse(size)) for size in sizes} | {(self.config.beam_size, 0)}
        for beam_size, size in sorted(searches):
            engine, phrases = self._engines(beam_size), (coarse(1), size) if size else (0, 0)
            for shape in engine.shapes(longest + len(tags.source), len(tags.target), phrases):
                yield functools.partial(engine.compile, weights, shape)
        for length in padded_lengths(longest + max(map(len, tags))):
            full = max(1, self.config.batch_tokens // length)
            for rows in sorted({min(full, coarse(count)) for count in range(1, full + 1)}):
                yield functools.partial(self._attention, weights, *[pad([], rows, length)] * 2)

    def score(
        self,
        params: Params,
        alpha: Alpha,
        pairs: Sequence[tuple[str, str]],
        tags: Sequence[Tags] | None = None,
    ) -> list[tuple[float, int]]:
        """Returns (log-probability, number of tokens) of each target given its source.

        Log-probabilities are natural logarithms. Both numbers include EOS, but no language tag. Raises `UserError` if
        a pair does not fit (see `fits`).
        """
        tags = tags or [NO_TAGS] * len(pairs)
        each = self.token_log_probs(params, alpha, *self.encode(pairs, tags))
        words = [log_probs[len(tag.target) :] for log_probs, tag in zip(each, tags, strict=True)]
        return [(float(log_probs.sum(dtype=np.float64)), len(log_probs)) for log_probs in words]

    def fits(self, pairs: Sequence[tuple[str, str]], tags: Sequence[Tags]) -> list[bool]:
        """Returns for each pair whether the model has positions for both sides: always, unless they are learned."""
        longest = self.engine.longest or sys.maxsize
        return [max(map(len, sides)) <= longest for sides in zip(*self.encode(pairs, tags), strict=True)]

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
        return self._engines(self.config.beam_size)

    @functools.cached_property
    def _engines(self) -> Callable[[int], Engine]:
        """Returns a function that returns the engine with a beam size."""
        models = self.model, *(other.model for other in self.others)

        @functools.cache
        def engine(beam_size: int) -> Engine:
            config = dataclasses.replace(self.config, beam_size=beam_size)
            own, wider = self.tokenizer, beam_size > self.config.beam_size
            starts = word_starts(own.target_pieces, own.has_codes) if wider else ()
            return Engine(models, config, self.rounding, starts)

        return engine

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


def _seed(line: int, part: int) -> int:
    """Returns the number that seeds the samples of a part of a line; that of the first part is the line's number."""
    return (line + (part << 20)) % (1 << 31)
