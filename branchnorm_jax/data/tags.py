"""New language tags in an existing vocabulary."""

import re
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from branchnorm_jax.codes import base
from branchnorm_jax.data.tokenizer import ABSENT, leading_tags, load_tokenizer, readable
from branchnorm_jax.errors import UserError, some
from branchnorm_jax.tokens import UNK

SCRIPT_OR_REGION = re.compile(r"[a-z]{2,3}_[A-Z]\w+")
"""Names of languages in NLLB-200 and mBART-50."""


def new_languages(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Returns the wanted languages that are not known.

    Raises:
      UserError: if one of them seems to be another code of a known language, such as de of deu_Latn, or if all known
        languages have a name such as deu_Latn, and this one has not: other toolkits would not know it as a language.
    """
    new = [language for language in wanted if language not in known]
    for language in new:
        same = [other for other in known if base(other) == base(language)]
        # A variety, such as pt_BR beside pt, is a language of its own.
        if same and language.isalnum():
            raise UserError(
                f"the vocabulary has no language {language!r}, but {some(same)}; use that name, or call a variety "
                f"{language}_XX"
            )
        if known and all(map(SCRIPT_OR_REGION.fullmatch, known)) and not SCRIPT_OR_REGION.fullmatch(language):
            raise UserError(
                f"the languages of the vocabulary have names such as {some(known, 2)}; so must {language!r}"
            )
    return new


def add_tags(directory: Path, languages: Sequence[str]) -> None:
    """Adds the tags of languages to a vocabulary, after those that it has; all later ids grow.

    Sides without tags get none. Text is split into the same pieces as before.
    """
    tokenizer = load_tokenizer(directory)
    for path in directory.glob("*.model"):
        source = path.stem == "source"
        tags = leading_tags(tokenizer.source_pieces if source else tokenizer.target_pieces)
        start, new = UNK + 1 + len(tags), [f">>{lang}<<" for lang in languages if tags and lang not in tags]
        model = with_tags(path.read_bytes(), start, new)
        path.write_bytes(model)
        if path.with_suffix(".vocab").exists():
            path.with_suffix(".vocab").write_text(readable(model), encoding="utf-8")
        if not source and (directory / ABSENT).exists():
            ids = (index + len(new) * (index >= start) for index in tokenizer.absent_target)
            (directory / ABSENT).write_text("".join(f"{index}\n" for index in ids))


def with_tags(model: bytes, start: int, tags: Sequence[str]) -> bytes:
    """Returns a serialised SentencePiece model with further control symbols, with ids from `start`."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    pieces = list(proto.pieces)
    control = proto.SentencePiece.CONTROL
    pieces[start:start] = [proto.SentencePiece(piece=tag, score=0.0, type=control) for tag in tags]
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    proto.trainer_spec.vocab_size = len(pieces)
    proto.trainer_spec.control_symbols.extend(tags)
    return proto.SerializeToString()
