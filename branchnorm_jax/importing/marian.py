"""Models with a MarianTokenizer in the format of Hugging Face.

As a rule they are `MarianMTModel`s, such as those of OPUS-MT: a Post-LN Transformer with sinusoidal positions, a bias
of the logits, and a decoder whose first input is a vector of zeros, the embedding of <pad>. Our own exports also have
other classes, see `export/huggingface.py`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.export.bart import POSITIONS, positions
from branchnorm_jax.export.tokenizers import PAIRS, TAGGED
from branchnorm_jax.importing import bart
from branchnorm_jax.importing.imported import Imported, Side, Values, checked_ids, read_json, read_values
from branchnorm_jax.importing.pieces import make_side, parse
from branchnorm_jax.importing.tensors import Tensors, read
from branchnorm_jax.tokens import EOS, PAD, UNK

NETWORKS: dict[str, dict[str, Any]] = {
    "marian": dict(method="post_ln", positions="marian"),
    "fsmt": dict(method="post_ln", positions="fairseq"),
    "bart": dict(method="post_ln", positions="learned", embedding_norm=True),
    "m2m_100": dict(method="pre_ln", positions="fairseq"),
    "mbart": dict(method="pre_ln", positions="learned", embedding_norm=True),
}
"""model_type -> options of the network that are not in config.json."""

FIXED = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
}
"""Options of old versions of the format, with the values that all Marian models have; often missing."""

SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Options of tokenizer_config.json for PAD, EOS and UNK, with their defaults."""


def read_folder(folder: Path) -> Imported:
    """Reads a folder with config.json, weights, vocab.json, source.spm and target.spm.

    Raises:
      UserError: if a file is missing or damaged, or if the model uses a feature that this project does not support.
    """
    config = read_values(folder / "config.json")
    tokenizer = read_values(folder / "tokenizer_config.json", required=False)
    kind = config.get("model_type", str)
    if kind == "marian":
        config.check_fixed(FIXED)
    family = dict(NETWORKS[kind])
    if family["positions"] == "learned":
        family["max_positions"] = config.same("max_position_embeddings")
    weights = read(folder)
    if kind == "marian" and _has_own_positions(weights, config):
        family["positions"] = "tensor2tensor"
    model = bart.network(config, **family)
    source, target = _vocabularies(folder, config)
    params = bart.stacks(weights, model)
    params["embedding"], shared, unused = bart.embedding(weights, model.width, config, source, target)
    bart.add_positions(weights, model, params)
    weights.drop(*POSITIONS)  # sinusoids, which most files do not have
    weights.finish()
    generation = read_values(folder / "generation_config.json", required=False)
    unused = sorted({*unused, *target.ours(generation.get("suppress_tokens", list, []))})
    start = _start(config, params["embedding"], target)
    model = dataclasses.replace(model, shared_embeddings=shared, decoder_start=start)
    return Imported(
        model=dataclasses.replace(model, output_bias="bias" in params["embedding"]),
        decode=bart.search(folder, config),
        source_lang=tokenizer.get("source_lang", str, ""),
        target_lang=tokenizer.get("target_lang", str, ""),
        params=params,
        source=source,
        target=target,
        unused=unused,
        tagged=tokenizer.get(TAGGED, str, "source"),
        pairs=tokenizer.get(PAIRS, str, ""),
    )


def _has_own_positions(weights: Tensors, config: Values) -> bool:
    """Returns whether the file has Marian's own sinusoids, as our exports of Marian's own models do."""
    shape = config.same("max_position_embeddings"), config.same("d_model")
    found = [weights.take(name, *shape) for name in POSITIONS if name in weights]
    return bool(found) and np.allclose(found, positions(*shape), atol=1e-3)


def _start(config: Values, embedding: dict[str, np.ndarray], target: Side) -> str:
    """Returns `model.decoder_start`.

    Raises:
      UserError: if the decoder starts from a token of another kind.
    """
    start = config.get("decoder_start_token_id", int)
    ours = target.ids.index(start) if start in target.ids else -1
    table = embedding["shared" if "shared" in embedding else "target"]
    if ours >= 0 and not table[ours].any():
        return "zero"
    names = {EOS: "eos", PAD: "pad", UNK: "unk"}
    if ours not in names:
        raise UserError(
            f"{config.path}: decoder_start_token_id={start} must be EOS, padding, the unknown piece, or a piece whose "
            "embedding is zero"
        )
    return names[ours]


def _vocabularies(folder: Path, config: Values) -> tuple[Side, Side]:
    """Reads the vocabularies of source and target. With a single vocab.json, both have the same pieces and ids."""
    tokenizer = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    named = (tokenizer.get(name) or text for name, text in SPECIAL.items())
    special = [str(each.get("content")) if isinstance(each, dict) else str(each) for each in named]
    apart = (folder / "target_vocab.json").exists()
    models = [parse(folder / f"{side}.spm") for side in ("source", "target")]
    sides = []
    for index, name in enumerate(("vocab.json", "target_vocab.json" if apart else "vocab.json")):
        ids = checked_ids(folder / name, read_json(folder / name))
        if missing := [piece for piece in special if piece not in ids]:
            raise UserError(f"{folder / name}: the special pieces {', '.join(missing)} are missing")
        if ids[special[1]] != (expected := config.get("eos_token_id", int)):
            raise UserError(
                f"{folder / name}: {special[1]} has the id {ids[special[1]]}, but eos_token_id is {expected}"
            )
        size = bart.sizes(config)[index]
        if max(ids.values()) >= size:
            raise UserError(f"{folder / name}: it has ids up to {max(ids.values())}, but the model has {size} pieces")
        # Exports of fairseq's models have some, such as <s>.
        control = {each.piece for each in models[index].pieces if each.type == each.CONTROL}
        alike = [models[index]] if apart else models
        sides.append(make_side(models[index], ids, special, alike, bool(index), control))
    return sides[0], sides[1]
