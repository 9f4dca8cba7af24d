"""Vocabularies of text that was split by the codes of subword-nmt or fastBPE."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from branchnorm_jax.data.bpe import CONTINUES, END, HYPHEN, MosesBPE
from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.errors import UserError
from branchnorm_jax.importing.imported import Side

VERSIONS = {"#version: 0.1": True, "#version: 0.2": False}
"""First line of subword-nmt's codes -> `MosesBPE.end_apart`."""

MERGE, COUNTED = re.compile("([^ ]+ [^ ]+) *"), re.compile("([^ ]+ [^ ]+) [0-9]+ *")
"""Lines of subword-nmt's codes and of fastBPE's."""

HYPHENS = (HYPHEN, "##AT##-##AT##")
"""A hyphen inside a word, after the tokenizer of Moses with `-a`, and in Google's text of WMT'16."""

ESCAPED = re.compile("&(apos|quot|amp|lt|gt|#[0-9]+);")
"""Characters that the tokenizer of Moses has escaped."""


def read_codes(path: Path) -> tuple[list[str], bool]:
    """Returns the merges in a file of subword-nmt or fastBPE, and `MosesBPE.end_apart`.

    Raises:
      UserError: if the file cannot be read, or is not such a file.
    """
    lines = list(text_lines(path))
    version = lines[0].rstrip() if lines and lines[0].startswith("#version") else ""
    if version and version not in VERSIONS:
        raise UserError(f"{path}: {version} is not supported, only {' and '.join(VERSIONS)}")
    first = 1 if version else 0
    pattern = COUNTED if not version and lines and COUNTED.fullmatch(lines[0]) else MERGE
    merges = []
    for number, line in enumerate(lines[first:], start=first + 1):
        match = pattern.fullmatch(line)
        if not match:
            raise UserError(
                f"{path}, line {number}: expected two symbols{' and a count' if pattern is COUNTED else ''}, as in the "
                "codes of subword-nmt or fastBPE"
            )
        merges.append(match[1])
    if not any(merge.endswith(END) for merge in merges):
        raise UserError(f"{path}: no line ends a word with {END}, so these are not codes of subword-nmt or fastBPE")
    return merges, VERSIONS.get(version, any(merge.endswith(f" {END}") for merge in merges))


def make_side(
    path: Path, language: str, ids: Mapping[str, int], special: Sequence[str], control: Collection[str]
) -> Side:
    """Returns the vocabulary of one side in the order of this project: special pieces first, then those of `ids`.

    The pieces show what the tokenizer of Moses did with the text of the training, so it does the same here.

    Args:
      path: the codes.
      language: code of the language.
      ids: piece -> id in the other toolkit.
      special: its pieces for PAD, EOS and UNK.
      control: further pieces that are not part of a text.

    Raises:
      UserError: if the file has no codes, or if they make hardly any of the pieces.
    """
    merges, end_apart = read_codes(path)
    made = {merge.replace(" ", "") for merge in merges}
    made = {piece.removesuffix(END) if piece.endswith(END) else piece + CONTINUES for piece in made}
    if len(made & ids.keys()) < len(made) / 10:
        raise UserError(
            f"{path}: only {len(made & ids.keys())} of {len(made)} merges are in dict.{language}.txt: the two do not "
            "belong together"
        )
    pieces = [*special, *sorted(ids.keys() - {*special}, key=ids.__getitem__)]
    hyphens = [hyphen for hyphen in HYPHENS if hyphen in ids]
    processor = MosesBPE(
        language=language,
        split_hyphens=bool(hyphens),
        escape=any(map(ESCAPED.search, ids)),
        end_apart=end_apart,
        control=[index for index, piece in enumerate(pieces) if piece in {*special[:2], *control}],
        pieces=pieces,
        merges=merges,
        hyphen=(*hyphens, HYPHEN)[0],
    )
    return Side(processor.serialized_model_proto(), pieces, [ids[piece] for piece in pieces])
