"""Transformers of fairseq: a checkpoint with its dictionaries, and the SentencePiece model or the codes of its text.

The names of the weights are those of Hugging Face's BART without their first part, and the options have the same
meaning under other names, so both are renamed and read as in `bart.py`.
"""

import argparse
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.data.bpe import CONTINUES
from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.errors import UserError, some
from branchnorm_jax.export.bart import OUTPUT
from branchnorm_jax.export.fold import SUBLAYERS
from branchnorm_jax.export.tokenizers import FIRST
from branchnorm_jax.importing import bart, codes
from branchnorm_jax.importing.imported import Imported, Side, Values
from branchnorm_jax.importing.pieces import make_side, parse
from branchnorm_jax.importing.tensors import Tensors, arrays, load_torch
from branchnorm_jax.options import DecodeConfig, ModelConfig

BEST = "checkpoint_best.pt"

RENAMED = {
    "encoder_embed_dim": "d_model",
    "encoder_ffn_embed_dim": "encoder_ffn_dim",
    "decoder_ffn_embed_dim": "decoder_ffn_dim",
    "activation_fn": "activation_function",
}
"""Options of fairseq -> names in `bart.py`."""

SAME = {
    "decoder_embed_dim": "encoder_embed_dim",
    "decoder_output_dim": "decoder_embed_dim",
    "decoder_input_dim": "decoder_embed_dim",
    "decoder_normalize_before": "encoder_normalize_before",
    "decoder_learned_pos": "encoder_learned_pos",
}
"""Options that must have the value of another one, if they are there."""

UNSUPPORTED = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "base_layers",
    "character_embeddings",
    "cross_self_attention",
    "no_cross_attention",
    "no_decoder_final_norm",
    "no_token_positional_embeddings",
)
"""Options that must be false, zero or missing."""

CODES = "codes (bpecodes, codes or code, such as bpe.codes)", re.compile(r"(.+\.)?(bpecodes|codes?)(\..+)?")
SENTENCEPIECE = "a SentencePiece model (.model or .spm)", re.compile(r".+\.(model|spm)")
"""Files that split text: description, and pattern of their names."""


def read_folder(folder: Path) -> Imported:
    """Reads a folder with a checkpoint, dict.<language>.txt for both languages, and SentencePiece models or codes.

    Raises:
      UserError: if a file is missing or damaged, or if the model uses a feature that this project does not support.
    """
    path = _checkpoint(folder)
    checkpoint = load_torch(path, (argparse.Namespace, *_numpy_types()))
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), Mapping):
        raise UserError(f"{path}: not a checkpoint of fairseq, which has the entries model, and args or cfg")
    options = Values(path, _options(path, checkpoint))
    languages = tuple(options.get(name, str) for name in ("source_lang", "target_lang"))
    dictionaries = [_dictionary(folder / f"dict.{lang}.txt") for lang in languages]
    sides = _sides(folder, languages, dictionaries)
    sizes = {"vocab_size": len(dictionaries[0]), "decoder_vocab_size": len(dictionaries[1])}
    config = Values(path, _renamed(options) | sizes)
    weights = Tensors(folder, {_name(name): array for name, array in arrays(path, checkpoint["model"])})
    model = _network(options, config)
    params = bart.stacks(weights, model)
    params["embedding"], shared, unused = bart.embedding(weights, model.width, config, *sides)
    bart.add_positions(weights, model, params)
    for stack in SUBLAYERS:
        # Which sinusoids there are, and the version of the format.
        weights.drop(f"model.{stack}.embed_positions._float_tensor", f"model.{stack}.version")
    weights.finish()
    return Imported(
        model=dataclasses.replace(model, shared_embeddings=shared),
        # What fairseq-generate does without options.
        decode=DecodeConfig(beam_size=5, length_penalty=1.0, max_length_a=0.0, max_length_b=200),
        params=params,
        source=sides[0],
        target=sides[1],
        unused=unused,
        source_lang=languages[0],
        target_lang=languages[1],
    )


def _checkpoint(folder: Path) -> Path:
    """Returns the path of the checkpoint: checkpoint_best.pt, or the only .pt file."""
    found = sorted(folder.glob("*.pt"))
    if (folder / BEST) in found:
        return folder / BEST
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:3]) or "none"
        raise UserError(f"{folder}: expected {BEST} or a single .pt file, not {names}")
    return found[0]


def _numpy_types() -> tuple[Any, ...]:
    """Returns what NumPy's scalars consist of; old checkpoints have some in their record of the training."""
    scalar = np.float64(0).__reduce__()[0]
    return scalar, np.dtype, *(type(np.dtype(kind)) for kind in (np.float32, np.float64, np.int32, np.int64, np.bool_))


def _options(path: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the task and of the model. Checkpoints before fairseq 0.10 have them in `args`."""

    def plain(options: Any) -> dict[str, Any]:
        if options is None:
            return {}
        if not isinstance(options, Mapping | argparse.Namespace):
            raise UserError(f"{path}: its options are a {type(options).__name__} instead of names with values")
        return dict(options) if isinstance(options, Mapping) else vars(options)

    if checkpoint.get("args") is not None:
        return plain(checkpoint["args"])
    config = plain(checkpoint.get("cfg"))
    return plain(config.get("task")) | plain(config.get("model"))


def _renamed(options: Values) -> dict[str, Any]:
    """Returns the options of the network under the names of `bart.py`.

    Raises:
      UserError: if the model uses a feature that this project does not support.
    """
    for name in UNSUPPORTED:
        if options.values.get(name):
            raise UserError(f"{options.path}: {name}={options.values[name]} is not supported")
    for name, other in SAME.items():
        if name in options and options.values[name] != (options.values.get(other) or False):
            raise UserError(
                f"{options.path}: {name}={options.values[name]} must be equal to {other}={options.values.get(other)}"
            )
    tied = options.get("share_decoder_input_output_embed", bool, False)
    given = {RENAMED.get(name, name): value for name, value in options.values.items() if value is not None}
    return (
        {"activation_function": "relu"}
        | given
        | {
            "scale_embedding": not options.get("no_scale_embedding", bool, False),
            "tie_word_embeddings": tied or options.get("share_all_embeddings", bool, False),
        }
    )


def _network(options: Values, config: Values) -> ModelConfig:
    """Returns the options of the network."""
    family: dict[str, Any] = dict(positions="fairseq")
    if options.get("encoder_learned_pos", bool, False):
        family = dict(positions="learned", max_positions=options.same("max_source_positions", "max_target_positions"))
    return bart.network(
        config,
        method="pre_ln" if options.get("encoder_normalize_before", bool, False) else "post_ln",
        embedding_norm=options.get("layernorm_embedding", bool, False),
        **family,
    )


def _name(theirs: str) -> str:
    """Returns the name of a weight in `bart.py`."""
    return OUTPUT if theirs == "decoder.output_projection.weight" else f"model.{theirs}"


def _dictionary(path: Path) -> dict[str, int]:
    """Reads the ids of the pieces, one line "piece count" each, in the order of the lines."""
    ids = {piece: index for index, piece in enumerate(FIRST)}
    for number, line in enumerate(text_lines(path), start=1):
        if line.endswith("#fairseq:overwrite"):
            raise UserError(f"{path}, line {number}: #fairseq:overwrite is not supported")
        piece, _, count = line.rpartition(" ")
        if not piece or not count.isdecimal():
            raise UserError(f"{path}, line {number}: expected a piece and its count")
        if piece in ids:
            raise UserError(f"{path}, line {number}: {piece!r} is there twice")
        ids[piece] = len(ids)
    return ids


def _sides(folder: Path, languages: tuple[str, ...], dictionaries: list[dict[str, int]]) -> list[Side]:
    """Returns the vocabularies of both sides."""
    control = {FIRST[0], *(piece for ids in dictionaries for piece in ids if piece.startswith("madeupword"))}
    pieces = [piece for ids in dictionaries for piece in ids]
    # A vocabulary of SentencePiece may contain a piece that ends in @@ by chance.
    if sum(piece.endswith(CONTINUES) for piece in pieces) > sum(piece.startswith("▁") for piece in pieces):
        return [
            codes.make_side(_file(folder, lang, *CODES), lang, ids, bart.SPECIAL, control)
            for lang, ids in zip(languages, dictionaries, strict=True)
        ]
    models = [parse(_file(folder, lang, *SENTENCEPIECE)) for lang in languages]
    shared = dictionaries[0] == dictionaries[1]
    return [
        make_side(model, ids, bart.SPECIAL, models if shared else [model], bool(index), control)
        for index, (model, ids) in enumerate(zip(models, dictionaries, strict=True))
    ]


def _file(folder: Path, lang: str, kind: str, pattern: re.Pattern[str]) -> Path:
    """Returns the path of the only file whose name matches, or of the only one that also names the language."""
    found = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    named = [path for path in found if lang in path.name.split(".")]
    if len(found) == 1 or len(named) == 1:
        return (named or found)[0]
    if found:
        names = some([path.name for path in found])
        raise UserError(
            f"{folder}: several files with {kind}, {names}; their names need languages, like x.{lang}.model"
        )
    other = "a dictionary has pieces with @@" if kind == CODES[0] else "no dictionary has pieces with @@"
    raise UserError(f"{folder}: no file with {kind}, which the model needs, because {other}")
