"""Translations as values, the translation of a line that was split, and alignments."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from branchnorm_jax.decoding.parts import Part, join


class Translation(NamedTuple):
    """One translation of a line, without language tags."""

    text: str
    score: float
    """Log-probability divided by the length penalty."""
    log_prob: float
    """Natural log-probability, EOS included."""
    pieces: tuple[tuple[str, float], ...] = ()
    """Pieces and their log-probabilities, EOS last."""
    tokens: tuple[int, ...] = ()
    """Token ids of the pieces."""
    source: tuple[int, ...] = ()
    """Token ids of the source, EOS last."""
    attention: np.ndarray | None = None
    """Attention weights, float32 [target tokens, source tokens]; None unless requested, or if there are `parts`."""
    parts: tuple["Translation", ...] = ()
    """If the line was split, the translations of its parts."""
    warning: str = ""
    """Describes the source text that was cut off; empty if none was."""

    @property
    def blocks(self) -> list[np.ndarray]:
        """Attention weights of each part, or of the whole line; empty unless requested."""
        return [part.attention for part in self.parts or [self] if part.attention is not None]


def joined(translations: Sequence[Sequence[Translation]], parts: Sequence[Part]) -> list[Translation]:
    """Returns the translations of a line from those of its parts, best first.

    The k-th translation consists of the k-th best translations of all parts. Its score and its log-probability are the
    sums of theirs. Pieces and tokens are concatenated, each part with its EOS. Except for the best one, a translation
    is empty, with a score of -inf, if the search found fewer than k translations of a part.

    Args:
      translations: `nbest` translations of each part, best first.
      parts: the parts.
    """
    if len(parts) == 1:
        return [each._replace(warning=parts[0].warning) for each in translations[0]]
    best, *others = zip(*translations, strict=True)
    others = [
        ranked if all(each.score > -np.inf for each in ranked) else tuple(map(_empty, ranked)) for ranked in others
    ]
    return [
        Translation(
            join([each.text for each in ranked], parts),
            sum(each.score for each in ranked),
            sum(each.log_prob for each in ranked),
            tuple(piece for each in ranked for piece in each.pieces),
            tuple(token for each in ranked for token in each.tokens),
            tuple(token for each in ranked for token in each.source),
            parts=ranked,
        )
        for ranked in (best, *others)
    ]


def _empty(part: Translation) -> Translation:
    """Returns a translation as it is if the search found none."""
    none = None if part.attention is None else part.attention[:0]
    return part._replace(text="", score=-np.inf, log_prob=-np.inf, pieces=(), tokens=(), attention=none)


def pharaoh(blocks: Sequence[np.ndarray], eos: bool = False) -> list[tuple[int, int]]:
    """Returns alignment points (i, j) from attention weights.

    Source token i has the largest weight for target token j, as with fairseq's `--print-alignment`. Indices count from
    0 through all blocks, and EOS is excluded on both sides. The first of several largest weights counts.

    Args:
      blocks: weights of each part of a line, [target tokens, source tokens].
      eos: whether the indices count the EOS at the end of each part before.
    """
    points, first_source, first_target = [], 0, 0
    for block in blocks:
        inner = block[:-1, :-1]
        if inner.size:
            points += [(first_source + int(row.argmax()), first_target + j) for j, row in enumerate(inner)]
        targets, sources = (block if eos else inner).shape
        first_source, first_target = first_source + sources, first_target + targets
    return points


def block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Returns one matrix of attention weights; they are 0 between different parts."""
    matrix = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.float32)
    row = column = 0
    for block in blocks:
        matrix[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return matrix
