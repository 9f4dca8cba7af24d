"""Marian models in the format of Hugging Face (`MarianMTModel`), such as those of OPUS-MT.

A Post-LN Transformer with sinusoidal positions, a bias of the logits, and a decoder whose first input is a vector of
zeros, the embedding of <pad>. `export/huggingface.py` writes the same format.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS, UNUSED_BIAS
from branchnorm_jax.export.huggingface import ATTENTION, NORMS, OUT
from branchnorm_jax.importing.imported import Imported, Side, Values, checked_ids, read_json, read_values
from branchnorm_jax.importing.pieces import make_side, parse
from branchnorm_jax.importing.tensors import Tensors, read
from branchnorm_jax.options import DecodeConfig, ModelConfig

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
"""Names of activations in config.json -> `model.activation`."""

FIXED = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
}
"""Options of old versions of the format, with the values that all Marian models have; often missing."""

SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Options of tokenizer_config.json for PAD, EOS and UNK, with their defaults."""

SHARED, SOURCE, TARGET, OUTPUT = (
    *("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
    "lm_head.weight",
)


def read_folder(folder: Path) -> Imported:
    """Reads a folder with config.json, weights, vocab.json, source.spm and target.spm.

    Raises:
      UserError: if a file is missing or damaged, or if the model uses a feature that this project does not support.
    """
    config = read_values(folder / "config.json")
    tokenizer = read_values(folder / "tokenizer_config.json", required=False)
    generation = read_values(folder / "generation_config.json", required=False)
    model = _options(config)
    source, target = _vocabularies(folder, config)
    weights = read(folder)
    params = {stack: _stack(weights, stack, model) for stack in SUBLAYERS}
    params["embedding"], shared, unused = _embedding(weights, model.width, config, source, target)
    weights.finish()
    longest = config.same("max_position_embeddings") if "max_position_embeddings" in config else 512
    # Old models have the options of the search in config.json.
    search = {name: generation if name in generation else config for name in ("num_beams", "length_penalty")}
    return Imported(
        model=dataclasses.replace(model, shared_embeddings=shared),
        decode=DecodeConfig(
            beam_size=search["num_beams"].get("num_beams", int, 1),
            length_penalty=search["length_penalty"].get("length_penalty", float, 1.0),
            max_input_length=max(4, min(1024, longest)),
        ),
        source_lang=tokenizer.get("source_lang", str, ""),
        target_lang=tokenizer.get("target_lang", str, ""),
        params=params,
        source=source,
        target=target,
        unused=unused,
    )


def _options(config: Values) -> ModelConfig:
    """Returns the options of the network."""
    for name, expected in FIXED.items():
        if config.get(name, bool, expected) != expected:
            raise UserError(f"{config.path}: {name}={not expected} is not supported, only {expected}")
    activation = config.get("activation_function", str, "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(f"{config.path}: activation_function={activation} is not supported; known: {[*ACTIVATIONS]}")
    width, heads = config.same("d_model"), config.same("encoder_attention_heads", "decoder_attention_heads")
    if width % heads or width % 2:
        raise UserError(f"{config.path}: d_model={width} must be even and a multiple of {heads} attention heads")
    start, end = config.get("decoder_start_token_id", int), config.get("eos_token_id", int)
    return ModelConfig(
        method="post_ln",
        encoder_layers=config.same("encoder_layers"),
        decoder_layers=config.same("decoder_layers"),
        width=width,
        ffn_width=config.same("encoder_ffn_dim", "decoder_ffn_dim"),
        heads=heads,
        activation=ACTIVATIONS[activation],
        decoder_start="eos" if start == end else "zero",
        output_bias=True,
        dropout=config.get("dropout", float, 0.1),
        attention_dropout=config.get("attention_dropout", float, 0.0),
        activation_dropout=config.get("activation_dropout", float, 0.0),
    )


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
        size = _sizes(config)[index]
        if max(ids.values()) >= size:
            raise UserError(f"{folder / name}: it has ids up to {max(ids.values())}, but the model has {size} pieces")
        sides.append(make_side(models[index], ids, special, [models[index]] if apart else models, bool(index)))
    return sides[0], sides[1]


def _sizes(config: Values) -> tuple[int, int]:
    """Returns the sizes of the vocabularies of source and target."""
    size = config.same("vocab_size")
    return size, config.get("decoder_vocab_size", int, size)


def _embedding(
    weights: Tensors, width: int, config: Values, source: Side, target: Side
) -> tuple[dict[str, np.ndarray], str, list[int]]:
    """Returns embedding tables in our order of pieces, which of them are shared, and the unused target pieces.

    Files may contain a shared table once or several times, so tables are shared if they are equal. The bias of the
    logits is among the tables.
    """
    sizes = _sizes(config)
    expected = {SHARED: sizes[0], SOURCE: sizes[0], TARGET: sizes[1], OUTPUT: sizes[1]}
    found = {name: weights.take(name, size, width) for name, size in expected.items() if name in weights}
    target_name = TARGET if TARGET in found else SHARED
    names = {
        "source": SOURCE if SOURCE in found else SHARED,
        "target": target_name,
        "output": target_name if config.get("tie_word_embeddings", bool, True) else OUTPUT,
    }
    if missing := set(names.values()) - found.keys():
        raise UserError(f"{config.path.parent}: the weights contain no {', '.join(sorted(missing))}")
    tables = {name: found[theirs] for name, theirs in names.items()}
    weights.drop("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
    start = config.get("decoder_start_token_id", int)
    if start != config.get("eos_token_id", int) and not (0 <= start < sizes[1] and not tables["target"][start].any()):
        raise UserError(
            f"{config.path}: decoder_start_token_id={start} must be EOS, or a piece whose embedding is zero"
        )
    # Our embeddings always have this factor.
    scale = np.float32(1.0 if config.get("scale_embedding", bool, False) else width**-0.5)
    bias = weights.take("final_logits_bias", 1, sizes[1])[0][target.rows]
    # Such biases come from our own exports.
    unused = sorted({*target.absent, *np.flatnonzero(bias <= UNUSED_BIAS / 2).tolist()})
    bias[unused] = 0.0
    ours = {
        "source": tables["source"][source.rows] * scale,
        "target": tables["target"][target.rows] * scale,
        "output": tables["output"][target.rows],
        "bias": bias,
    }
    if not np.array_equal(ours["target"], ours["output"]):
        return ours, "none", unused
    del ours["output"]
    if not np.array_equal(ours["source"], ours["target"]):
        return ours, "decoder", unused
    return {"shared": ours["source"], "bias": bias}, "all", unused


def _stack(weights: Tensors, stack: str, model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of the layers of a stack, [L, ...] each. Theirs are matrices [d_out, d_in]."""
    width, hidden = model.width, model.ffn_width
    layers = range(model.encoder_layers if stack == "encoder" else model.decoder_layers)

    def stacked(name: str, *shape: int) -> np.ndarray:
        return np.stack([weights.take(f"model.{stack}.layers.{layer}.{name}", *shape) for layer in layers])

    def matrix(name: str, d_in: int, d_out: int) -> dict[str, np.ndarray]:
        kernel = stacked(f"{name}.weight", d_out, d_in).swapaxes(1, 2)
        return {"kernel": np.ascontiguousarray(kernel), "bias": stacked(f"{name}.bias", d_out)}

    params: dict[str, Any] = {}
    for sublayer in SUBLAYERS[stack]:
        if sublayer == "ffn":
            params[sublayer] = {"fc1": matrix("fc1", width, hidden), "fc2": matrix("fc2", hidden, width)}
        else:
            block = ATTENTION[sublayer]
            params[sublayer] = {ours: matrix(f"{block}.{theirs}", width, width) for ours, theirs in OUT.items()}
        norm = NORMS[sublayer]
        params[f"{sublayer}_post_norm"] = {
            "scale": stacked(f"{norm}.weight", width),
            "bias": stacked(f"{norm}.bias", width),
        }
    return params
