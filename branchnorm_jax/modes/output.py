"""Output of --mode=translate: plain lines for people and for other tools, or one JSON object per line."""

import json
import math
from collections.abc import Sequence
from typing import Any

from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.results import Translation, pharaoh
from branchnorm_jax.options import DecodeConfig


def plain_lines(index: int, hypotheses: Sequence[Translation], config: DecodeConfig) -> list[str]:
    """Formats the output for one source line as text.

    The output is the text of the best translation. If `decode.nbest` > 1, it is "line ||| text ||| score" for each
    hypothesis, with lines counted from 0 as in Moses. `decode.token_scores` appends the pieces and their
    log-probabilities: "text ||| piece:-0.12 ...". `decode.alignments` appends the aligned pairs of source and target
    piece: "text ||| 0-0 2-1 ...".

    Args:
      index: number of source lines before this one.
      hypotheses: the translations, best first.
      config: decoding options.
    """
    printed = []
    for hypothesis in hypotheses:
        fields = [hypothesis.text] if config.nbest == 1 else [str(index), hypothesis.text, f"{hypothesis.score:.4f}"]
        if config.token_scores:
            fields.append(" ".join(f"{piece}:{log_prob:.4f}" for piece, log_prob in hypothesis.pieces))
        if config.alignments:
            fields.append(" ".join(f"{i}-{j}" for i, j in pharaoh(hypothesis.blocks)))
        printed.append(" ||| ".join(fields))
    return printed


def json_line(source: str, hypotheses: Sequence[Translation], config: DecodeConfig, tokenizer: Tokenizer) -> str:
    """Formats the output for one source line as a JSON object.

    The object has the source and the fields of the translation or, if `decode.nbest` > 1, a list of hypotheses. It
    contains the same values as the text output.

    Args:
      source: the source line, without language tag and prefix.
      hypotheses: the translations, best first.
      config: decoding options.
      tokenizer: the vocabulary.
    """
    each = [_fields(hypothesis, config, tokenizer) for hypothesis in hypotheses]
    return to_json({"source": source} | (each[0] if config.nbest == 1 else {"hypotheses": each}))


def best_translation(line: str) -> str:
    """Returns the best translation in a line of `json_line`, and any other line as it is.

    Raises:
      ValueError, LookupError, TypeError: if the line begins like one of `json_line` and is something else.
    """
    if not line.startswith('{"source": '):
        return line
    fields = json.loads(line)
    return str(fields.get("hypotheses", [fields])[0]["translation"])


def to_json(values: dict[str, Any]) -> str:
    """Returns an object as one line of JSON."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def _fields(hypothesis: Translation, config: DecodeConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields of a translation. The numbers in `alignments` are places in the two lists of pieces."""
    found = hypothesis.score > -math.inf
    fields: dict[str, Any] = {
        "translation": hypothesis.text,
        "score": round(hypothesis.score, 6) if found else None,
        "log_prob": round(hypothesis.log_prob, 6) if found else None,
    }
    if config.token_scores or config.alignments:
        fields["pieces"] = [piece for piece, _ in hypothesis.pieces]
    if config.token_scores:
        fields["token_scores"] = [round(log_prob, 6) for _, log_prob in hypothesis.pieces]
    if config.alignments:
        fields["source_pieces"] = tokenizer.source_pieces_of(list(hypothesis.source))
        fields["alignments"] = pharaoh(hypothesis.blocks, eos=True)
    if hypothesis.parts:
        fields["parts"] = len(hypothesis.parts)
    if hypothesis.warning:
        fields["warning"] = hypothesis.warning
    return fields
