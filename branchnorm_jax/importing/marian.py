"""Marian models in the format of Hugging Face (`MarianMTModel`), such as those of OPUS-MT.

A Post-LN Transformer with sinusoidal positions, a bias of the logits, and a decoder whose first input is a vector of
zeros, the embedding of <pad>. `export/huggingface.py` writes the same format.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.data.tokenizer import TAG
from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS, UNUSED_BIAS
from branchnorm_jax.export.huggingface import ATTENTION, NORMS, OUT
from branchnorm_jax.importing.imported import Imported, Side, read_json
from branchnorm_jax.importing.pieces import ordered, parse, with_pieces
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

SHARED, SOURCE, TARGET, OUTPUT = (
    *("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
    "lm_head.weight",
)


def read_folder(folder: Path) -> Imported:
    """Reads a folder with config.json, weights, vocab.json, source.spm and target.spm.

    Raises:
      UserError: if a file is missing or damaged, or if the model has something that this project has not.
    """
    config = read_json(folder / "config.json")
    tokenizer = read_json(folder / "tokenizer_config.json", {})
    generation = read_json(folder / "generation_config.json", {})
    model = _options(folder, config)
    source, target = _vocabularies(folder, tokenizer, config)
    weights = read(folder)
    params = {stack: _stack(weights, stack, model) for stack in SUBLAYERS}
    params["embedding"], shared = _embedding(weights, model.width, config, source, target)
    weights.finish()
    languages = [match[1] for match in map(TAG.fullmatch, source.pieces) if match]
    target_lang = tokenizer.get("target_lang")
    return Imported(
        model=dataclasses.replace(model, shared_embeddings=shared),
        decode=DecodeConfig(
            beam_size=int(generation.get("num_beams") or config.get("num_beams") or 1),
            length_penalty=float(generation.get("length_penalty") or 1.0),
            max_input_length=min(1024, int(config.get("max_position_embeddings", 512))),
        ),
        source_lang=str(tokenizer.get("source_lang") or ""),
        target_langs=tuple(languages or ([str(target_lang)] if target_lang else [])),
        params=params,
        source=source,
        target=target,
    )


def _options(folder: Path, config: dict[str, Any]) -> ModelConfig:
    """Returns the options of the network."""
    path = folder / "config.json"

    def number(*names: str) -> int:
        values = [config.get(name) for name in names]
        if not isinstance(values[0], int) or len(set(values)) > 1:
            raise UserError(f"{path}: {' and '.join(names)} must be the same whole number, not {values}")
        return values[0]

    for name, expected in FIXED.items():
        if config.get(name, expected) != expected:
            raise UserError(f"{path}: {name}={config[name]} is not supported, only {expected}")
    activation = config.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(f"{path}: activation_function={activation} is not supported, only {', '.join(ACTIVATIONS)}")
    return ModelConfig(
        method="post_ln",
        encoder_layers=number("encoder_layers"),
        decoder_layers=number("decoder_layers"),
        width=number("d_model"),
        ffn_width=number("encoder_ffn_dim", "decoder_ffn_dim"),
        heads=number("encoder_attention_heads", "decoder_attention_heads"),
        activation=ACTIVATIONS[activation],
        decoder_start="eos" if number("decoder_start_token_id") == number("eos_token_id") else "zero",
        output_bias=True,
        dropout=float(config.get("dropout", 0.1)),
        attention_dropout=float(config.get("attention_dropout", 0.0)),
        activation_dropout=float(config.get("activation_dropout", 0.0)),
    )


def _vocabularies(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> tuple[Side, Side]:
    """Reads the vocabularies of source and target. With a single vocab.json, both have the same pieces and ids."""
    apart = (folder / "target_vocab.json").exists()
    models = [parse(folder / f"{side}.spm") for side in ("source", "target")]
    special = [
        tokenizer.get(f"{name}_token") or text for name, text in (("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>"))
    ]
    special = [each["content"] if isinstance(each, dict) else each for each in special]
    sides = []
    for index, name in enumerate(("vocab.json", "target_vocab.json" if apart else "vocab.json")):
        ids = read_json(folder / name)
        if missing := [piece for piece in special if piece not in ids]:
            raise UserError(f"{folder / name}: the special pieces {', '.join(missing)} are missing")
        if ids[special[1]] != config["eos_token_id"]:
            raise UserError(f"{folder / name}: {special[1]} has not the id eos_token_id={config['eos_token_id']}")
        pieces = ordered(ids, special, [models[index]] if apart else models)
        # As in `MarianTokenizer`, source pieces without an id are unknown to the network (see `Side.rows`). Those of
        # the target are split further: their probability is 0, so they must not occur in training.
        never = pieces[len(ids) :] if index else ()
        spm = with_pieces(models[index], pieces, never)
        sides.append(Side(spm, pieces, [ids.get(piece, -1) for piece in pieces]))
    return sides[0], sides[1]


def _embedding(
    weights: Tensors, width: int, config: dict[str, Any], source: Side, target: Side
) -> tuple[dict[str, np.ndarray], str]:
    """Returns the embedding tables, in our order of pieces, with the bias of the logits; and which tables are shared.

    Files may contain a shared table once or several times, so tables are shared if they are equal.
    """
    sizes = config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]
    expected = {SHARED: sizes[0], SOURCE: sizes[0], TARGET: sizes[1], OUTPUT: sizes[1]}
    found = {name: weights.take(name, size, width) for name, size in expected.items() if name in weights}
    tied = config.get("tie_word_embeddings", True)
    names = {
        "source": SOURCE if SOURCE in found else SHARED,
        "target": (target_name := TARGET if TARGET in found else SHARED),
        "output": target_name if tied else OUTPUT,
    }
    if missing := set(names.values()) - found.keys():
        raise UserError(f"import: the weights contain no {', '.join(sorted(missing))}")
    tables = {name: found[theirs] for name, theirs in names.items()}
    weights.drop("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
    start = config["decoder_start_token_id"]
    if start != config["eos_token_id"] and tables["target"][start].any():
        raise UserError(f"import: the decoder starts from token {start}, whose embedding is not zero; not supported")
    # Our embeddings always have this factor.
    scale = np.float32(1.0 if config.get("scale_embedding", False) else width**-0.5)
    ours = {
        "source": tables["source"][source.rows] * scale,
        "target": tables["target"][target.rows] * scale,
        "output": tables["output"][target.rows],
    }
    bias = weights.take("final_logits_bias", 1, sizes[1])[0][target.rows]
    bias[target.unused] = UNUSED_BIAS
    if not np.array_equal(ours["target"], ours["output"]):
        return ours | {"bias": bias}, "none"
    if not np.array_equal(ours["source"], ours["target"]):
        return {"source": ours["source"], "target": ours["target"], "bias": bias}, "decoder"
    return {"shared": ours["source"], "bias": bias}, "all"


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
            params[sublayer] = {
                ours: matrix(f"{ATTENTION[sublayer]}.{name}", width, width) for ours, name in OUT.items()
            }
        norm = NORMS[sublayer]
        params[f"{sublayer}_post_norm"] = {
            "scale": stacked(f"{norm}.weight", width),
            "bias": stacked(f"{norm}.bias", width),
        }
    return params
