"""What is asked and what is answered, as JSON. No HTTP, no threads."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.data.tokenizer import Tags
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.translate import Sentence, Translation, Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import BranchScale
from branchnorm_jax.options import DecodeConfig, ServeConfig


class Asked(NamedTuple):
    """What a request asks for."""

    lines: tuple[str, ...]
    tags: tuple[Tags, ...]
    nbest: int
    alignments: bool


def parse(body: bytes, serve: ServeConfig, decode: DecodeConfig, languages: Languages) -> Asked:
    """The request in a body such as {"text": ["one", "two"], "nbest": 2, "alignments": true, "target_lang": "de"}.

    What it leaves out is as `decode` says. Raises `UserError` with one line for anything else.
    """
    try:
        given = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not JSON ({error})") from error
    if not isinstance(given, dict) or "text" not in given:
        raise UserError('the body must be an object with a text: {"text": "..."}')
    text, nbest = given.pop("text"), given.pop("nbest", decode.nbest)
    alignments, target_lang = given.pop("alignments", decode.alignments), given.pop("target_lang", decode.target_lang)
    if given:
        raise UserError(f"unknown field {next(iter(given))[:40]!r}; there are text, nbest, alignments, target_lang")
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
            raise UserError(f"line {number}: {line[error.start]!a} without its other half is no text") from error
    if type(nbest) is not int or not 1 <= nbest <= decode.beam_size:
        raise UserError(f"nbest must be a whole number from 1 to {decode.beam_size} (decode.beam_size)")
    if type(alignments) is not bool:
        raise UserError("alignments must be true or false")
    if not isinstance(target_lang, str) or not target_lang.isascii():
        raise UserError("target_lang must be a string such as de")
    texts, tags = languages.asked(lines, target_lang)
    return Asked(tuple(texts), tuple(tags), nbest, alignments)


def answers(
    translator: Translator, params: Params, branch_scale: BranchScale
) -> Callable[[Sequence[Asked]], list[bytes]]:
    """The function that translates the lines of several requests together, and gives the answer to each.

    Its answers are what `--mode=translate` finds for the lines of a request by themselves: lines are numbered within
    their request.
    """

    def translate(asked: Sequence[Asked]) -> list[bytes]:
        lines = [
            (line, number, tag, one)
            for one in asked
            for number, (line, tag) in enumerate(zip(one.lines, one.tags, strict=True), start=1)
        ]
        sources, cut = translator.sources([line for line, *_ in lines])
        sentences = [
            Sentence(source, number, tag, nbest=one.nbest)
            for source, (_, number, tag, one) in zip(sources, lines, strict=True)
        ]
        found = translator.search(params, branch_scale, sentences)
        looking = [index for index, (*_, one) in enumerate(lines) if one.alignments]
        attended = translator.attended(
            params, branch_scale, [sentences[index] for index in looking], [found[index] for index in looking]
        )
        for index, each in zip(looking, attended, strict=True):
            found[index] = each
        shown = iter(
            [
                answer(one, translator.tokenizer.source_pieces_of(source), cut.get(index))
                for one in each
                if one.score > -math.inf
            ]
            for index, (source, each) in enumerate(zip(sources, found, strict=True))
        )
        return [to_json({"translations": [next(shown) for _ in one.lines]}) for one in asked]

    return translate


def answer(found: Translation, source_pieces: list[str], warning: str | None) -> dict[str, Any]:
    """One translation as JSON; with its attention, pieces on both sides."""
    shown: dict[str, Any] = {"text": found.text, "score": found.score, "log_prob": found.log_prob}
    if found.attention is not None:
        shown["pieces"] = [piece for piece, _ in found.pieces]
        shown["source_pieces"] = source_pieces
        shown["alignment"] = np.round(found.attention.astype(np.float64), 5).tolist()
    return shown | ({"warnings": [warning]} if warning else {})


def to_json(content: Mapping[str, Any]) -> bytes:
    """UTF-8 that any program reads: no NaN."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
