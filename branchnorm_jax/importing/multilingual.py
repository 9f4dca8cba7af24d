"""M2M-100, NLLB-200 (`m2m_100`) and mBART-50 (`mbart`) in the format of Hugging Face.

Pre-LN Transformers with fairseq's positions, or in mBART with learned positions and a norm after the embeddings. The
source begins with the tag of its own language. The decoder starts from EOS, and its first token is the tag of the
target language. So the tags are those of `data.tags=each`; `__de__`, `deu_Latn` and `de_DE` become `>>de<<` and so on.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from branchnorm_jax.data.tags import SCRIPT_OR_REGION
from branchnorm_jax.data.tokenizer import TAG
from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS
from branchnorm_jax.export.tokenizers import FIRST, LANGUAGES, SPM, VOCAB
from branchnorm_jax.importing import bart
from branchnorm_jax.importing.imported import Imported, Side, Values, checked_ids, read_json, read_values
from branchnorm_jax.importing.pieces import make_side, parse
from branchnorm_jax.importing.tensors import read
from branchnorm_jax.options import DecodeConfig

FORCED = "forced_bos_token_id"

SPECIAL = {"pad_token_id": "<pad>", "eos_token_id": "</s>", "decoder_start_token_id": "</s>"}
"""Options of config.json -> the pieces that they must name."""

FIXED = {
    "normalize_before": True,
    "normalize_embedding": True,
    "add_final_layer_norm": True,
    "static_position_embeddings": False,
    "add_bias_logits": False,
}
"""Options of old versions of mBART, with the values that its class has; often missing."""

M2M100 = {"activation_function": "relu", "scale_embedding": True}
"""Defaults of the class that are not those of `bart.py`."""

LANGUAGE = re.compile(rf"__(\w+)__|({SCRIPT_OR_REGION.pattern})")
"""Token of a language, in M2M-100 and elsewhere."""


def read_folder(folder: Path) -> Imported:
    """Reads a folder with config.json, weights, sentencepiece.bpe.model and, for M2M-100, vocab.json.

    Raises:
      UserError: if a file is missing or damaged, or if the model uses a feature that this project does not support.
    """
    values = read_json(folder / "config.json")
    mbart = values.get("model_type") == "mbart"
    config = Values(folder / "config.json", values if mbart else M2M100 | values)
    tokenizer = read_values(folder / "tokenizer_config.json", required=False)
    config.check_fixed(FIXED)
    if tokenizer.get("legacy_behaviour", bool, False):
        raise UserError(f"{tokenizer.path}: legacy_behaviour=True, a tag after the end of the source, is not supported")
    family: dict[str, Any] = dict(positions="fairseq")
    if mbart:
        family = dict(positions="learned", max_positions=config.same("max_position_embeddings"), embedding_norm=True)
    model = bart.network(config, method="pre_ln", **family)
    source, target = (_side(folder, config, tokenizer, target) for target in (False, True))
    generation = read_values(folder / "generation_config.json", required=False)
    weights = read(folder)
    params = bart.stacks(weights, model)
    params["embedding"], shared, unused = bart.embedding(weights, model.width, config, source, target)
    bart.add_positions(weights, model, params)
    weights.drop(*(f"model.{stack}.embed_positions.weights" for stack in SUBLAYERS))  # sinusoids
    weights.finish()
    return Imported(
        model=dataclasses.replace(model, shared_embeddings=shared, output_bias="bias" in params["embedding"]),
        decode=_search(folder, config, tokenizer, source),
        params=params,
        source=source,
        target=target,
        unused=sorted({*unused, *target.ours(generation.get("suppress_tokens", list, []))}),
        tagged="each",
    )


def _search(folder: Path, config: Values, tokenizer: Values, side: Side) -> DecodeConfig:
    """Returns the options of the search, with the languages that the folder names."""
    tags = {side.ids[ours]: match[1] for ours, piece in enumerate(side.pieces) if (match := TAG.fullmatch(piece))}
    generation = read_values(folder / "generation_config.json", required=False)
    forced = (generation if FORCED in generation else config).get(FORCED, int, -1)
    return dataclasses.replace(
        bart.search(folder, config),
        source_lang=tokenizer.get("src_lang", str, ""),
        target_lang=tags.get(forced, tokenizer.get("tgt_lang", str, "")),
    )


def _side(folder: Path, config: Values, tokenizer: Values, target: bool) -> Side:
    """Reads the vocabulary, which both sides share."""
    if not (folder / SPM).exists():
        raise UserError(f"{folder}: no {SPM}, which an import needs; a copy is next to the original of this model")
    model, size = parse(folder / SPM), config.same("vocab_size")
    standard = "mbart50" if config.get("model_type", str) == "mbart" else "nllb"
    ids, languages, control = _ids(folder, model, tokenizer, LANGUAGES[standard])
    if max(ids.values()) >= size:
        raise UserError(f"{folder}: the vocabulary has ids up to {max(ids.values())}, but the model has {size} pieces")
    # fairseq fills its vocabularies up.
    unnamed = {f"madeupword{index:04}": index for index in set(range(size)) - {*ids.values()}}
    if [ids.get(piece) for piece in FIRST] != [*range(len(FIRST))]:
        raise UserError(f"{folder}: the first pieces of the vocabulary must be {', '.join(FIRST)}")
    for name, piece in SPECIAL.items():
        if config.get(name, int) != ids[piece]:
            raise UserError(f"{config.path}: {name} must be {ids[piece]}, the id of {piece}")
    tagged = {f">>{languages[piece]}<<" if piece in languages else piece: index for piece, index in ids.items()}
    return make_side(model, tagged | unnamed, bart.SPECIAL, [model], target, control | unnamed.keys())


def _ids(
    folder: Path, model: Any, tokenizer: Values, standard: list[str]
) -> tuple[dict[str, int], dict[str, str], set[str]]:
    """Returns the ids of all pieces, the languages of some of them, and those that are never part of a text.

    `standard` are the languages of a model without vocab.json that does not list them.
    """
    if (folder / VOCAB).exists():
        ids = read_json(folder / VOCAB)
        name = tokenizer.get("language_codes", str, "m2m100")
        if name not in LANGUAGES:
            raise UserError(f"{tokenizer.path}: language_codes={name} is not known, only {', '.join(LANGUAGES)}")
        more = {f"__{lang}__": index for index, lang in enumerate(LANGUAGES[name], start=len(ids))}
    else:
        if [each.piece for each in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
            raise UserError(f"{folder / SPM}: its first pieces are not <unk>, <s> and </s>")
        ids = {piece: index for index, piece in enumerate((*FIRST, *(each.piece for each in model.pieces[3:])))}
        _check_same(folder, ids)
        more = _added(folder, tokenizer)
        if not any(map(LANGUAGE.fullmatch, more)):
            more = {piece: index for index, piece in enumerate((*standard, "<mask>"), start=len(ids))}
    languages = {piece: match[1] or match[2] for piece in more if (match := LANGUAGE.fullmatch(piece))}
    return checked_ids(folder / SPM, ids | more), languages, {"<s>", *more} - languages.keys()


def _check_same(folder: Path, ids: Mapping[str, int]) -> None:
    """Raises `UserError` if tokenizer.json, which transformers reads, has other pieces than the SentencePiece model."""
    vocab = read_values(folder / "tokenizer.json", required=False).get("model", dict, {}).get("vocab", {})
    if isinstance(vocab, list):
        vocab = {str(entry[0]): index for index, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    if not isinstance(vocab, dict):
        raise UserError(f"{folder / 'tokenizer.json'}: the vocabulary is a {type(vocab).__name__}")
    other = [piece for piece, index in ids.items() if vocab and vocab.get(piece) != index]
    if len(other) > len(ids) / 2:
        raise UserError(
            f"{folder}: {SPM} and tokenizer.json do not belong to the same model: {len(other):,} of {len(ids):,} "
            f"pieces, such as {other[0]!r}, have other ids"
        )


def _added(folder: Path, tokenizer: Values) -> dict[str, int]:
    """Returns the ids of the tokens that the tokenizer has beyond its SentencePiece model, if the folder lists them."""
    path = folder / "tokenizer.json"
    listed = read_values(path, required=False).get("added_tokens", list, [])
    found = tokenizer.get("added_tokens_decoder", dict, {})
    try:
        return {str(each["content"]): int(each["id"]) for each in listed} | {
            str(each["content"]): int(index) for index, each in found.items()
        }
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} or {tokenizer.path}: the added tokens cannot be read ({error!r})") from error
