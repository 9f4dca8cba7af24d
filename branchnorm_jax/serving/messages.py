"""JSON requests and answers, without HTTP and threads."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.data.tokenizer import Tags
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.translate import Sentence, Translation, Translator
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
            (line, number, tag, request)
            for request in requests
            for number, (line, tag) in enumerate(zip(request.lines, request.tags, strict=True), start=1)
        ]
        sources, cut = translator.sources([line for line, *_ in lines])
        sentences = [
            Sentence(source, number, tag, nbest=request.nbest)
            for source, (_, number, tag, request) in zip(sources, lines, strict=True)
        ]
        results = translator.search(params, alpha, sentences)
        wanted = [index for index, (*_, request) in enumerate(lines) if request.alignments]
        attended = translator.with_attention(
            params,
            alpha,
            [sentences[index] for index in wanted],
            [results[index] for index in wanted],
        )
        for index, each in zip(wanted, attended, strict=True):
            results[index] = each
        shown = iter(
            [
                answer(translation, translator.tokenizer.source_pieces_of(source), cut.get(index))
                for translation in each
                if translation.score > -math.inf
            ]
            for index, (source, each) in enumerate(zip(sources, results, strict=True))
        )
        return [to_json({"translations": [next(shown) for _ in request.lines]}) for request in requests]

    return translate


def answer(translation: Translation, source_pieces: list[str], warning: str | None) -> dict[str, Any]:
    """Converts a translation to JSON values.

    Attention weights come with the pieces of both sides.
    """
    fields: dict[str, Any] = {"text": translation.text, "score": translation.score, "log_prob": translation.log_prob}
    if translation.attention is not None:
        fields["pieces"] = [piece for piece, _ in translation.pieces]
        fields["source_pieces"] = source_pieces
        fields["alignment"] = np.round(translation.attention.astype(np.float64), 5).tolist()
    return fields | ({"warnings": [warning]} if warning else {})


def to_json(content: Mapping[str, Any]) -> bytes:
    """Encodes JSON as UTF-8. Raises `ValueError` for NaN, which is not valid JSON."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
