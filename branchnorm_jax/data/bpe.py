"""Text as fairseq's models read it: Moses's tokens, split by the codes of subword-nmt or fastBPE.

Codes are pairs of symbols in the order in which they are merged. SentencePiece ranks the merged symbols instead, so it
splits some words differently.

Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016).
"""

import dataclasses
import functools
import heapq
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from branchnorm_jax.codes import base
from branchnorm_jax.errors import UserError
from branchnorm_jax.tokens import EOS, UNK

CONTINUES = "@@"
"""End of the pieces after which a word goes on."""

END = "</w>"
"""End of a word in codes."""

HYPHEN = "@-@"
"""A hyphen inside a word, after the tokenizer of Moses with `-a`."""

_CACHED = 1 << 17  # words


@dataclasses.dataclass(frozen=True)
class MosesBPE:
    """Converts text to ids and back, with the methods of SentencePieceProcessor that are used here; thread-safe.

    Attributes:
      language: code of the language, for Moses.
      split_hyphens: whether a hyphen inside a word is a token.
      escape: whether tokens are escaped: &apos; and others.
      end_apart: whether the end of a word is a symbol at first, and not part of the last character (version 0.1).
      control: ids of pieces that are not part of a text.
      pieces: all pieces in the order of their ids.
      merges: pairs of symbols, separated by a space, in the order in which they are merged.
      hyphen: the token of a hyphen inside a word, if not that of Moses.
    """

    language: str
    split_hyphens: bool
    escape: bool
    end_apart: bool
    control: Sequence[int]
    pieces: Sequence[str]
    merges: Sequence[str]
    hyphen: str = HYPHEN

    def __str__(self) -> str:
        language = base(self.language)
        return (
            f"sacremoses.MosesTokenizer({language!r}).tokenize(line, aggressive_dash_splits={self.split_hyphens}, "
            f"escape={self.escape})" + (f" with {self.hyphen} for {HYPHEN}" if self.hyphen != HYPHEN else "")
        )

    def encode(self, lines: Sequence[str], /) -> list[list[int]]:
        """Returns the ids of each line, EOS appended. Pieces without an id are UNK."""
        split = self._moses[0].tokenize
        options = {"aggressive_dash_splits": self.split_hyphens, "escape": self.escape}
        tokens = ([self.hyphen if each == HYPHEN else each for each in split(line, **options)] for line in lines)
        return [[*itertools.chain.from_iterable(map(self._ids_of, line)), EOS] for line in tokens]

    def decode(self, ids: Sequence[int], /) -> str:
        """Returns the text of ids, without control pieces."""
        pieces = (f"{self.pieces[index]} " for index in ids if index not in self.control)
        tokens = "".join(pieces).replace(f"{CONTINUES} ", "").split()
        return str(self._moses[1].detokenize([HYPHEN if each == self.hyphen else each for each in tokens]))

    def id_to_piece(self, ids: list[int], /) -> list[str]:
        """Returns the pieces of ids."""
        return [self.pieces[index] for index in ids]

    def piece_to_id(self, piece: str, /) -> int:
        """Returns the id of a piece, or UNK."""
        return self._ids.get(piece, UNK)

    def get_piece_size(self) -> int:
        """Returns the number of pieces."""
        return len(self.pieces)

    def serialized_model_proto(self) -> bytes:
        """Returns the attributes as JSON, for `load`."""
        return (json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1) + "\n").encode()

    def codes(self) -> bytes:
        """Returns the codes in the format of subword-nmt."""
        return "\n".join([f"#version: 0.{1 if self.end_apart else 2}", *self.merges, ""]).encode()

    @functools.cached_property
    def _moses(self) -> tuple[Any, Any]:
        import sacremoses  # which most vocabularies do not need, and which takes 0.2 seconds

        language = base(self.language)
        return sacremoses.MosesTokenizer(language), sacremoses.MosesDetokenizer(language)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: index for index, piece in enumerate(self.pieces)}

    @functools.cached_property
    def _ids_of(self) -> Callable[[str], list[int]]:
        """Cached function from a token to the ids of its pieces."""
        # The first of two equal merges counts.
        ranks = {tuple(merge.split(" ")): -rank for rank, merge in enumerate(reversed(self.merges))}

        @functools.lru_cache(maxsize=_CACHED)
        def ids_of(token: str) -> list[int]:
            symbols = merged([*token, END] if self.end_apart else [*token[:-1], token[-1] + END], ranks)
            *others, last = symbols[:-1] if symbols[-1] == END else symbols
            return [*(self.piece_to_id(each + CONTINUES) for each in others), self.piece_to_id(last.removesuffix(END))]

        return ids_of


def load(content: bytes, path: Path) -> MosesBPE:
    """Returns the processor that `serialized_model_proto` wrote to `path`. Raises `UserError` if it is damaged."""
    try:
        return MosesBPE(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not the vocabulary of an imported model ({error}); import the model again") from error


def merged(symbols: list[str], ranks: Mapping[tuple[str, ...], int]) -> list[str]:
    """Merges the pair of neighbours with the lowest rank everywhere, from left to right, until no pair has a rank.

    The time is n log n, because text without spaces can be one long word.

    >>> merged([*"ababa"], {("b", "a"): 1, ("a", "b"): 0, ("ab", "a"): 2})
    ['ab', 'aba']
    >>> merged([*"aaa"], {("a", "a"): 0})
    ['aa', 'a']
    """
    symbols, count = [*symbols, ""], len(symbols)
    before, after = [*range(-1, count)], [*range(1, count + 1), count]

    def rank(index: int) -> int | None:
        """Returns the rank of a symbol and the next one. Symbols that were merged into another are empty."""
        return ranks.get((symbols[index], symbols[after[index]]))

    heap: list[tuple[int, int]] = []
    changed = [*range(count)]
    while changed or heap:
        for index in changed:
            if (found := rank(index)) is not None:
                heapq.heappush(heap, (found, index))
        best, changed = heap[0][0] if heap else None, []
        while heap and heap[0][0] == best:
            _, index = heapq.heappop(heap)
            if rank(index) == best:  # Otherwise, a neighbour has been merged.
                other = after[index]
                symbols[index] += symbols[other]
                symbols[other] = ""
                after[index] = after[other]
                before[after[index]] = index
                changed += [before[index], index] if index else [index]
    return [symbol for symbol in symbols if symbol]
