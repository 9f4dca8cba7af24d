"""JSON requests and answers, without HTTP and threads."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.data.tokenizer import Tags, Tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.results import Translation, block_diagonal
from branchnorm_jax.decoding.sentences import Line
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.options import DecodeConfig, ServeConfig


class TranslationRequest(NamedTuple):
    """A parsed request; `tags` has one entry per line."""

    lines: tuple[str, ...]
    tags: tuple[Tags, ...]
    nbest: int
    alignments: bool


def parse(body: bytes, serve: ServeConfig, decode: DecodeConfig, languages: Languages) -> TranslationRequest:
    """Parses the JSON body of a request.

    Example: {"text": ["one", "two"], "nbest": 2, "alignments": true, "target_lang": "de"}. Fields other than "text" are
    optional; their defaults come from `decode`. Another one is "source_lang". Raises `UserError` for an invalid body.
    """
    try:
        given = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not JSON ({error})") from error
    if not isinstance(given, dict) or "text" not in given:
        raise UserError('the body must be an object with a field text: {"text": "..."}')
    text, nbest = given.pop("text"), given.pop("nbest", decode.nbest)
    alignments = given.pop("alignments", decode.alignments)
    named = {name: given.pop(name, getattr(decode, name)) for name in ("source_lang", "target_lang")}
    if given:
        fields = ", ".join(("text", "nbest", "alignments", *named))
        raise UserError(f"unknown field {next(iter(given))[:40]!r}; fields are {fields}")
    lines = [text] if isinstance(text, str) else text
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UserError("text must be a string or a list of strings")
    if len(lines) > serve.max_lines:
        raise UserError(f"text has {len(lines):,} lines, more than {serve.max_lines:,} (serve.max_lines)")
    for number, line in enumerate(lines, start=1):
        if len(line) > serve.max_characters:
            most = f"{serve.max_characters:,} (serve.max_characters)"
            raise UserError(f"line {number} has {len(line):,} characters, more than {most}")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"line {number}: {line[error.start]!a} is an unpaired surrogate; send valid Unicode"
            ) from error
    if type(nbest) is not int or not 1 <= nbest <= decode.beam_size:
        raise UserError(f"nbest must be a whole number from 1 to {decode.beam_size} (decode.beam_size)")
    if type(alignments) is not bool:
        raise UserError("alignments must be true or false")
    for name, lang in named.items():
        if not isinstance(lang, str) or not lang.isascii():
            raise UserError(f"{name} must be a string such as de")
    texts, tags = languages.split_tags(lines, named["target_lang"], source=named["source_lang"])
    return TranslationRequest(tuple(texts), tuple(tags), nbest, alignments)


def answers(
    translator: Translator, params: Params, alpha: Alpha
) -> Callable[[Sequence[TranslationRequest]], list[bytes]]:
    """Returns a function that answers several requests in one batch.

    Lines are numbered within their request, so an answer is the same as that of `--mode=translate` for the lines of the
    request alone.
    """

    def translate(requests: Sequence[TranslationRequest]) -> list[bytes]:
        lines = [
            Line(text, number, tag, nbest=request.nbest, attention=request.alignments)
            for request in requests
            for number, (text, tag) in enumerate(zip(request.lines, request.tags, strict=True), start=1)
        ]
        shown = iter(
            [answer(each, translator.tokenizer) for each in translations if each.score > -math.inf]
            for translations in translator.translate_lines(params, alpha, lines)
        )
        return [to_json({"translations": [next(shown) for _ in request.lines]}) for request in requests]

    return translate


def answer(translation: Translation, tokenizer: Tokenizer) -> dict[str, Any]:
    """Converts a translation to JSON values.

    Attention weights come with the pieces of both sides. They are 0 between different parts of a line that was split.
    """
    fields: dict[str, Any] = {"text": translation.text, "score": translation.score, "log_prob": translation.log_prob}
    if blocks := translation.blocks:
        fields["pieces"] = [piece for piece, _ in translation.pieces]
        fields["source_pieces"] = tokenizer.source_pieces_of(list(translation.source))
        fields["alignment"] = np.round(block_diagonal(blocks).astype(np.float64), 5).tolist()
    return fields | ({"warnings": [translation.warning]} if translation.warning else {})


def to_json(content: Mapping[str, Any]) -> bytes:
    """Encodes JSON as UTF-8. Raises `ValueError` for NaN, which is not valid JSON."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
