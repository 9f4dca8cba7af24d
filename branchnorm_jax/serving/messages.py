"""JSON requests and answers, without HTTP and threads."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.data.lines import RepeatedNameError, unique_names
from branchnorm_jax.data.tokenizer import Tags, Tokenizer
from branchnorm_jax.decoding.glossary import NO_TERMS, Glossary, make_glossary
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.results import Translation, block_diagonal
from branchnorm_jax.decoding.sentences import Line, Required
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.options import TERM_CHARACTERS, DecodeConfig, ServeConfig

Encode = Callable[[str], Sequence[int]]

PAIRS = '[["term", "translation"], ...]'
"""What the field "glossary" looks like."""


LANG_CHARACTERS = 40
"""Longest code of a language."""

WEIGHTS = 4_000_000
"""Attention weights in an answer, about 30 MB."""


class TranslationRequest(NamedTuple):
    """A parsed request.

    `tags` and `warnings` have one entry per line, and `glossary` the terms of the request and of the server.
    """

    lines: tuple[str, ...]
    tags: tuple[Tags, ...]
    warnings: tuple[str, ...]
    nbest: int
    alignments: bool
    glossary: Glossary = NO_TERMS


def parse(
    body: bytes,
    serve: ServeConfig,
    decode: DecodeConfig,
    languages: Languages,
    encode: Encode,
    base: Glossary = NO_TERMS,
) -> TranslationRequest:
    """Parses the JSON body of a request.

    Example: {"text": ["one", "two"], "nbest": 2, "alignments": true, "target_lang": "de", "glossary": [["one",
    "eins"]]}. Fields other than "text" are optional; their defaults come from `decode`. Another one is "source_lang".

    Args:
      body: the body.
      serve: limits.
      decode: defaults.
      languages: the languages of the model.
      encode: returns the token ids of a phrase; raises `UserError` if the model cannot write it.
      base: terms that every request has.

    Raises:
      UserError: for an invalid body.
    """
    try:
        given = json.loads(body.decode("utf-8"), object_pairs_hook=unique_names)
    except UnicodeDecodeError as error:
        raise UserError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from error
    except RepeatedNameError as error:
        raise UserError(f"the body is wrong: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not JSON ({error})") from error
    if not isinstance(given, dict) or "text" not in given:
        raise UserError('the body must be an object with a field text: {"text": "..."}')
    text, nbest = given.pop("text"), given.pop("nbest", decode.nbest)
    alignments = given.pop("alignments", decode.alignments)
    named = {name: given.pop(name, getattr(decode, name)) for name in ("source_lang", "target_lang")}
    entries = given.pop("glossary", [])
    if given:
        fields = ", ".join(("text", "nbest", "alignments", "glossary", *named))
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
        check_unicode(f"line {number}", line)
    if type(nbest) is not int or not 1 <= nbest <= decode.beam_size:
        raise UserError(f"nbest must be a whole number from 1 to {decode.beam_size} (decode.beam_size)")
    if type(alignments) is not bool:
        raise UserError("alignments must be true or false")
    for name, lang in named.items():
        if not isinstance(lang, str) or not lang.isascii() or len(lang) > LANG_CHARACTERS:
            raise UserError(f"{name} must be a string such as de")
    texts, tags = languages.split_tags(lines, named["target_lang"], source=named["source_lang"])
    glossary = parse_glossary(entries, serve, decode).over(base)
    for number, line in enumerate(texts, start=1):
        tokens = sum(len(encode(phrase)) for phrase in glossary.translations(line))
        if tokens > serve.max_term_tokens:
            most = f"{serve.max_term_tokens:,} (serve.max_term_tokens)"
            raise UserError(f"line {number}: its terms have {tokens:,} tokens, more than {most}; split the line")
    warnings = tuple(map(languages.ignored_tag, texts))
    return TranslationRequest(tuple(texts), tuple(tags), warnings, nbest, alignments, glossary)


def parse_glossary(entries: Any, serve: ServeConfig, decode: DecodeConfig) -> Glossary:
    """Parses the field "glossary": a list of pairs of a term and its translation.

    Raises:
      UserError: if it is something else, is too large, or gives a term two translations.
    """
    if not isinstance(entries, list):
        raise UserError(f"glossary must be a list such as {PAIRS}")
    if len(entries) > serve.max_terms:
        raise UserError(f"glossary has {len(entries):,} terms, more than {serve.max_terms:,} (serve.max_terms)")
    if entries and decode.temperature:
        raise UserError("glossary needs beam search; this server samples (decode.temperature)")
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(text, str) for text in entry):
            raise UserError(f"glossary, entry {number}: expected two strings, as in {PAIRS}")
        for text in entry:
            if len(text) > TERM_CHARACTERS:
                raise UserError(
                    f"glossary, entry {number}: a text of {len(text):,} characters, more than {TERM_CHARACTERS}"
                )
            check_unicode(f"glossary, entry {number}", text)
    named = {f"glossary, entry {number}": entry for number, entry in enumerate(entries, start=1)}
    return make_glossary(named, "a term and a translation")


def check_unicode(where: str, text: str) -> None:
    """Raises `UserError` if a text from JSON is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {text[error.start]!a} is an unpaired surrogate; send valid Unicode") from error


def answers(
    translator: Translator, params: Params, alpha: Alpha
) -> Callable[[Sequence[TranslationRequest]], list[bytes]]:
    """Returns a function that answers several requests in one batch.

    Lines are numbered within their request, so an answer is the same as that of `--mode=translate` for the lines of the
    request alone.
    """

    def translate(requests: Sequence[TranslationRequest]) -> list[bytes]:
        lines = [
            Line(text, number, tag, Required(glossary=request.glossary), request.nbest, request.alignments)
            for request in requests
            for number, (text, tag) in enumerate(zip(request.lines, request.tags, strict=True), start=1)
        ]
        results = iter(translator.translate_lines(params, alpha, lines))
        each = [(request.warnings, [next(results) for _ in request.lines]) for request in requests]
        return [to_json({"translations": shown(found, translator.tokenizer, warnings)}) for warnings, found in each]

    return translate


def shown(
    results: Sequence[Sequence[Translation]], tokenizer: Tokenizer, warnings: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """Converts the translations of each line to JSON values.

    Each translation of a line has the warning about the line, if there is one, and those about itself.
    Attention weights come with the pieces of both sides. They are 0 between different parts of a line that was split.
    After `WEIGHTS` numbers, the alignments of the other lines are left out, with a warning.
    """
    left = WEIGHTS

    def fields_of(translation: Translation, warning: str) -> dict[str, Any]:
        nonlocal left
        fields: dict[str, Any] = {
            "text": translation.text,
            "score": translation.score,
            "log_prob": translation.log_prob,
        }
        said = [*filter(None, (warning, translation.warning))]
        if blocks := translation.blocks:
            weights = math.prod(np.sum([block.shape for block in blocks], axis=0).tolist())
            if weights <= left:
                left -= weights
                fields["pieces"] = [piece for piece, _ in translation.pieces]
                fields["source_pieces"] = tokenizer.source_pieces_of(list(translation.source))
                fields["alignment"] = np.round(block_diagonal(blocks).astype(np.float64), 5).tolist()
            else:
                said.append(f"no alignment: those of one request have at most {WEIGHTS:,} weights; send less text")
        return fields | ({"warnings": said} if said else {})

    return [
        [fields_of(each, warning) for each in translations if each.score > -math.inf]
        for translations, warning in zip(results, warnings, strict=True)
    ]


def to_json(content: Mapping[str, Any]) -> bytes:
    """Encodes JSON as UTF-8. Raises `ValueError` for NaN, which is not valid JSON."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
