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
from branchnorm_jax.decoding.engine import Asked, Engine, Weights, coarse, pad, padded_length, padded_lengths, rounded
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
    tokens: tuple[int, ...] = ()
    """Their ids."""
    attention: np.ndarray | None = None
    """How much each of them looks at each source token, float32 [target tokens, source tokens], where asked for.

    What it looks at a language tag is left out, as tags are of the tokens; score and log-probability count them.
    """


class Sentence(NamedTuple):
    """A line to translate."""

    source: Sequence[int]
    """Token ids, EOS last."""
    number: int
    """Of the line: what is drawn depends on it."""
    tags: Tags = NO_TAGS
    """What asks for the language of the translation, where there are several."""
    prefix: Sequence[int] = ()
    """Token ids that the translation begins with, without EOS."""
    nbest: int = 1
    """Translations wanted."""


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
        branch_scale: BranchScale,
        lines: Sequence[str],
        first_line: int = 1,
        progress: Callable[[int], Any] = lambda done: None,
        prefixes: Sequence[str] | None = None,
        tags: Sequence[Tags] | None = None,
        attention: bool = False,
    ) -> list[list[Translation]]:
        """The `nbest` translations of each line, in input order; of an empty line, empty ones.

        Lines are decoded in order of length, in batches of `decode.batch_tokens` source positions x beam. A line of
        more than `decode.max_input_length` tokens is cut with a warning that names it.

        Args:
          params: the model's parameters.
          branch_scale: alpha_t of the checkpoint.
          lines: source text.
          first_line: number of the first line, for warnings and for what is drawn.
          progress: called with the number of lines that were finished.
          prefixes: what the translation of each line begins with.
          tags: what asks for the language of each line's translation, where there are several.
          attention: whether to tell what each of their tokens looks at.
        """
        sources, cut = self.sources(lines)
        for index, warning in cut.items():
            self.warn(f"line {first_line + index}: {warning}")
        begins = [ids[:-1] for ids in self.tokenizer.encode_target(list(prefixes))] if prefixes else [[]] * len(lines)
        sentences = [
            Sentence(source, number, tag, prefix, self.config.nbest)
            for number, (source, tag, prefix) in enumerate(
                zip(sources, tags or [NO_TAGS] * len(lines), begins, strict=True), start=first_line
            )
        ]
        results = self.search(params, branch_scale, sentences, progress)
        for sentence, found in zip(sentences, results, strict=True):
            if found[0].score == -math.inf:
                asked = " that begins as asked" if sentence.prefix else ""
                self.warn(f"line {sentence.number}: no translation was found{asked}")
        return self.attended(params, branch_scale, sentences, results) if attention else results

    def sources(self, lines: Sequence[str]) -> tuple[list[list[int]], dict[int, str]]:
        """Token ids of source text, EOS last, and by index a warning for each line that had to be cut."""
        limit, cut = self.config.max_input_length, {}
        sources = self.tokenizer.encode_source(list(lines))
        for index, ids in enumerate(sources):
            if len(ids) > limit:
                cut[index] = f"cut from {len(ids)} to {limit} tokens"
                sources[index] = [*ids[: limit - 1], EOS]
        return sources, cut

    def search(
        self,
        params: Params,
        branch_scale: BranchScale,
        sentences: Sequence[Sentence],
        progress: Callable[[int], Any] = lambda done: None,
    ) -> list[list[Translation]]:
        """`translate` for token ids, without warnings and attention."""
        results = [[Translation("", 0.0, 0.0)] * sentence.nbest for sentence in sentences]
        # Of only EOS, nothing is to be translated.
        places = [place for place, each in enumerate(sentences) if len(each.source) > 1 or each.prefix]
        progress(len(sentences) - len(places))
        asked = [
            Asked([*tags.source, *source], number, [*tags.target, *prefix], nbest, len(tags.target))
            for source, number, tags, prefix, nbest in map(sentences.__getitem__, places)
        ]
        for index, found in self.engine.search(self._weights(params, branch_scale), asked):
            sentence, start = sentences[places[index]], len(sentences[places[index]].tags.target)
            results[places[index]] = [self._translation(found, rank, start) for rank in range(sentence.nbest)]
            progress(1)
        return results

    def attended(
        self,
        params: Params,
        branch_scale: BranchScale,
        sentences: Sequence[Sentence],
        found: Sequence[Sequence[Translation]],
    ) -> list[list[Translation]]:
        """Translations of sentences with their `attention`, that to and of tags left out."""
        pairs = zip(sentences, found, strict=True)
        flat = [(sentence.tags, sentence.source, one.tokens) for sentence, each in pairs for one in each]
        given = [[*tag.source, *source] for tag, source, _ in flat], [[*tag.target, *ids] for tag, _, ids in flat]
        maps = zip(self.attention(params, branch_scale, *given), flat, strict=True)
        looks = (whole[len(tag.target) :, len(tag.source) :] for whole, (tag, _, _) in maps)
        return [[one._replace(attention=next(looks)) for one in each] for each in found]

    def _translation(self, found: Hypotheses, rank: int, start: int) -> Translation:
        """The hypothesis of this rank, of those of one sentence, without the tags at its start."""
        tokens = found.tokens[rank].tolist()
        length = tokens.index(EOS) + 1 if EOS in tokens else start
        pieces = self.tokenizer.target_pieces_of(tokens[start:length])
        each = found.token_log_probs[rank, start:length].tolist()
        return Translation(
            self.tokenizer.decode_target(tokens),
            float(found.scores[rank]),
            float(found.log_probs[rank]),
            tuple(zip(pieces, each, strict=True)),
            tuple(tokens[start:length]),
        )

    def warm_up(self, params: Params, branch_scale: BranchScale, longest: int, tags: Tags = NO_TAGS) -> None:
        """Compiles what lines and translations of up to `longest` tokens and such tags need, attention included."""
        weights = self._weights(params, branch_scale)
        self.engine.warm_up(weights, longest + len(tags.source), len(tags.target))
        for length in padded_lengths(longest + max(map(len, tags))):
            full = max(1, self.config.batch_tokens // length)
            for rows in {min(full, coarse(count)) for count in range(1, full + 1)}:
                self._looks(weights, *[pad([], rows, length)] * 2)

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
        return self._by_target(self._forced, self._weights(params, branch_scale), sources, targets)

    def attention(
        self,
        params: Params,
        branch_scale: BranchScale,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """How much each token of each target looks at each of its source: float32 [target tokens, source tokens].

        The mean over heads of the cross-attention that predicts the token, of layer `decode.alignment_layer` or of all
        layers, and of all models that vote: rows sum to 1. Token ids that end in EOS; a target may be empty.
        """
        looks = self._by_target(self._looks, self._weights(params, branch_scale), sources, targets)
        return [each[:, : len(source)] for each, source in zip(looks, sources, strict=True)]

    def _by_target(
        self,
        program: Callable[[Weights, np.ndarray, np.ndarray], jax.Array],
        weights: Weights,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """What a program of weights, sources [B, T] and targets [B, T] gives for each token of each target."""
        results = [np.zeros(0)] * len(sources)
        longer = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        for indices, length, rows in self._batches(longer):
            batch = [pad([side[index] for index in indices], rows, length) for side in (sources, targets)]
            found = jax.device_get(program(weights, *batch))
            for row, index in enumerate(indices):
                results[index] = found[row, : len(targets[index])]
        return results

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """(indices, padded length, padded rows) of batches that cover all sentences."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        while order:
            length = padded_length(lengths[order[-1]])
            rows = max(1, self.config.batch_tokens // length)
            same = [index for index in order[-rows:] if padded_length(lengths[index]) == length]
            del order[-len(same) :]
            # A few lines (interactive use) are not worth a full batch.
            yield same, length, min(rows, coarse(len(same)))

    @functools.cached_property
    def engine(self) -> Engine:
        """What searches."""
        return Engine((self.model, *(other.model for other in self.others)), self.config, self.rounding)

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

    @functools.cached_property
    def _looks(self) -> Callable[[Weights, np.ndarray, np.ndarray], jax.Array]:
        models, layer = self.engine.models, self.config.alignment_layer

        @jax.jit
        def looks(weights: Weights, source: jax.Array, target: jax.Array) -> jax.Array:
            each = []
            for model, (params, branch_scale) in zip(models, weights, strict=True):
                depth = model.config.decoder_layers
                look_M = jnp.arange(1, depth + 1) == layer if layer else jnp.full(depth, 1 / depth)
                inputs = decoder_inputs(target)
                each.append(model.attention(params, source, inputs, branch_scale, look_M.astype(jnp.float32)))
            return jnp.stack(each).mean(0)

        return looks


def pharaoh(attention: np.ndarray) -> list[tuple[int, int]]:
    """(i, j): source token i is what target token j looks at most, counted from 0, EOS left out on both sides.

    fairseq's `--print-alignment`. Of equals the first; `attention` as `Translator.attention` gives it.
    """
    inner = attention[:-1, :-1]
    return [(int(row.argmax()), j) for j, row in enumerate(inner)] if inner.size else []
