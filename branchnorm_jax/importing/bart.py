"""Options, tables and layers of the models of BART's family, under Hugging Face's names.

`marian.py`, `multilingual.py` and `fairseq.py` read the rest.
"""

from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.export.bart import ATTENTION, NORMS, OFFSET, OUT, OUTPUT, PROJECTION, SHARED, SOURCE, TARGET
from branchnorm_jax.export.fold import SUBLAYERS, UNUSED_BIAS
from branchnorm_jax.importing.imported import Side, Values, beam_search, read_values
from branchnorm_jax.importing.tensors import Tensors
from branchnorm_jax.options import DecodeConfig, ModelConfig

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
"""Names of activations in config.json -> `model.activation`."""

SPECIAL = ["<pad>", "</s>", "<unk>"]
"""Fairseq's pieces for PAD, EOS and UNK."""


def network(config: Values, **family: Any) -> ModelConfig:
    """Returns the options of the network; `family` has those that are not in config.json."""
    activation = config.get("activation_function", str, "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(f"{config.path}: activation_function={activation} is not supported; known: {[*ACTIVATIONS]}")
    width, heads = config.same("d_model"), config.same("encoder_attention_heads", "decoder_attention_heads")
    if width % heads or width % 2:
        raise UserError(f"{config.path}: d_model={width} must be even and a multiple of {heads} attention heads")
    return ModelConfig(
        encoder_layers=config.same("encoder_layers"),
        decoder_layers=config.same("decoder_layers"),
        width=width,
        ffn_width=config.same("encoder_ffn_dim", "decoder_ffn_dim"),
        heads=heads,
        activation=ACTIVATIONS[activation],
        dropout=config.get("dropout", float, 0.1),
        attention_dropout=config.get("attention_dropout", float, 0.0),
        activation_dropout=config.get("activation_dropout", float, 0.0),
        **family,
    )


def search(folder: Path, config: Values) -> DecodeConfig:
    """Returns the options of the search."""
    generation = read_values(folder / "generation_config.json", required=False)
    longest = config.same("max_position_embeddings") if "max_position_embeddings" in config else 512
    return DecodeConfig(**beam_search(generation, config), max_input_length=max(4, min(1024, longest)))


def sizes(config: Values) -> tuple[int, int]:
    """Returns the sizes of the vocabularies of source and target."""
    if "src_vocab_size" in config:
        return config.same("src_vocab_size"), config.same("tgt_vocab_size")
    size = config.same("vocab_size")
    return size, config.get("decoder_vocab_size", int, size)


def embedding(
    weights: Tensors, width: int, config: Values, source: Side, target: Side
) -> tuple[dict[str, np.ndarray], str, list[int]]:
    """Returns embedding tables in our order of pieces, which of them are shared, and the unused target pieces.

    Files may contain a shared table once or several times, so tables are shared if they are equal. The bias of the
    logits is among the tables, unless it is zero.
    """
    of_source, of_target = sizes(config)
    output_name = PROJECTION if PROJECTION in weights else OUTPUT
    expected = {SHARED: of_source, SOURCE: of_source, TARGET: of_target, output_name: of_target}
    found = {name: weights.take(name, size, width) for name, size in expected.items() if name in weights}
    target_name = TARGET if TARGET in found else SHARED
    names = {
        "source": SOURCE if SOURCE in found else SHARED,
        "target": target_name,
        "output": target_name if config.get("tie_word_embeddings", bool, True) else output_name,
    }
    if missing := set(names.values()) - found.keys():
        raise UserError(f"{config.path.parent}: the weights contain no {', '.join(sorted(missing))}")
    tables = {name: found[theirs] for name, theirs in names.items()}
    # Our embeddings always have this factor.
    scale = np.float32(1.0 if config.get("scale_embedding", bool, False) else width**-0.5)
    bias = np.zeros(of_target, np.float32)
    if "final_logits_bias" in weights:
        bias = weights.take("final_logits_bias", 1, of_target)[0]
    bias = bias[target.rows]
    # Such biases come from our own exports.
    unused = sorted({*target.absent, *np.flatnonzero(bias <= UNUSED_BIAS / 2).tolist()})
    bias[unused] = 0.0
    learned = {"bias": bias} if bias.any() else {}
    ours = {
        "source": tables["source"][source.rows] * scale,
        "target": tables["target"][target.rows] * scale,
        "output": tables["output"][target.rows],
    }
    if not np.array_equal(ours["target"], ours["output"]):
        return ours | learned, "none", unused
    del ours["output"]
    if not np.array_equal(ours["source"], ours["target"]):
        return ours | learned, "decoder", unused
    return {"shared": ours["source"], **learned}, "all", unused


def stacks(weights: Tensors, model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of encoder and decoder, and of the norms at their ends if the model is Pre-LN."""
    params = {stack: _stack(weights, stack, model) for stack in SUBLAYERS}
    if model.method == "pre_ln":
        params |= {f"{stack}_norm": norm(weights, f"model.{stack}.layer_norm", model.width) for stack in SUBLAYERS}
    return params


def add_positions(weights: Tensors, model: ModelConfig, params: dict[str, Any]) -> None:
    """Adds learned positions and the norms after the embeddings to the parameters, if the model has them."""
    for stack in SUBLAYERS:
        if model.positions == "learned":
            rows = weights.take(f"model.{stack}.embed_positions.weight", OFFSET + model.max_positions, model.width)
            params["embedding"][f"{stack}_positions"] = rows[OFFSET:]
        if model.embedding_norm:
            params[f"{stack}_embedding_norm"] = norm(weights, f"model.{stack}.layernorm_embedding", model.width)


def norm(weights: Tensors, name: str, width: int) -> dict[str, np.ndarray]:
    """Returns the parameters of a norm that is not part of a layer."""
    return {"scale": weights.take(f"{name}.weight", width), "bias": weights.take(f"{name}.bias", width)}


def _stack(weights: Tensors, stack: str, model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of the layers of a stack, [L, ...] each. Theirs are matrices [d_out, d_in]."""
    width, hidden = model.width, model.ffn_width
    layers = range(model.encoder_layers if stack == "encoder" else model.decoder_layers)
    place = "pre" if model.method == "pre_ln" else "post"

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
        params[f"{sublayer}_{place}_norm"] = {
            "scale": stacked(f"{NORMS[sublayer]}.weight", width),
            "bias": stacked(f"{NORMS[sublayer]}.bias", width),
        }
    return params
