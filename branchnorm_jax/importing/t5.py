"""Models of the T5 family in the format of Hugging Face: T5, T5 v1.1, mT5, MADLAD-400 (model_type `t5` and `mt5`).

`export/t5.py` writes the same format, and tells what the import multiplies into the weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS
from branchnorm_jax.export.t5 import ACTIVATIONS, BLOCKS, EPSILON, GATED, OUTPUT, PLAIN, RELATIVE, SHARED, factors
from branchnorm_jax.importing.imported import Imported, Side, Values, beam_search, read_values
from branchnorm_jax.importing.pieces import make_side, parse
from branchnorm_jax.importing.tensors import Tensors, read
from branchnorm_jax.options import DecodeConfig, ModelConfig

KINDS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {
    "swish": "swish",
    "gated-gelu_new": "geglu_tanh",
    "gated-swish": "swiglu",
}
"""feed_forward_proj in config.json -> `model.activation`."""

TABLES = SHARED, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
"""Names of the embedding table, of which a file has one or several."""

EXTRA_IDS = 100
"""Pieces <extra_id_*> that a tokenizer appends, unless tokenizer_config.json has another number."""


def read_folder(folder: Path) -> Imported:
    """Reads a folder with config.json, weights and spiece.model.

    Raises:
      UserError: if a file is missing or damaged, or if the model uses a feature that this project does not support.
    """
    config = read_values(folder / "config.json")
    generation = read_values(folder / "generation_config.json", required=False)
    side, start = _vocabulary(config, generation)
    weights = read(folder)
    table, output = _tables(weights, config)
    model = _options(config, start, shared="all" if output is None else "inputs")
    of = factors(model.width, model.key_width, _epsilon(config), output is None, _scales_output(config))
    params: dict[str, Any] = {}
    for stack in SUBLAYERS:
        params |= _stack(weights, stack, model, of)
    params["decoder_norm"]["scale"] *= of["decoder_norm"]
    params["embedding"] = {"shared": table[side.rows] * of["embedding"]}
    if output is not None:
        params["embedding"]["output"] = output[side.rows] * of["output"]
    weights.finish()
    return Imported(
        model=model,
        decode=DecodeConfig(
            **beam_search(generation, config),
            split="none",  # only the first part would begin with the task
        ),
        source_lang="",
        target_lang="",
        params=params,
        source=side,
        target=side,
        unused=side.ours(_whole_numbers(generation, "suppress_tokens")),
    )


def _whole_numbers(options: Values, name: str) -> list[int]:
    """Returns a list of whole numbers, empty if it is missing. Raises `UserError` if it is something else."""
    found = options.get(name, list, [])
    if not all(type(each) is int for each in found):
        raise UserError(f"{options.path}: {name} must be a list of whole numbers")
    return found


def _options(config: Values, start: str, shared: str) -> ModelConfig:
    """Returns the options of the network."""
    activation = config.get(
        "feed_forward_proj", str, "gated-gelu" if config.get("model_type", str) == "mt5" else "relu"
    )
    if activation not in KINDS:
        raise UserError(f"{config.path}: feed_forward_proj={activation} is not supported; known: {[*KINDS]}")
    dropout = config.get("dropout_rate", float, 0.1)
    return ModelConfig(
        method="pre_ln",
        norm="rms_norm",
        biases=False,
        encoder_layers=config.same("num_layers"),
        decoder_layers=config.same("num_decoder_layers" if "num_decoder_layers" in config else "num_layers"),
        width=config.same("d_model"),
        ffn_width=config.same("d_ff"),
        heads=config.same("num_heads"),
        head_width=config.same("d_kv"),
        activation=KINDS[activation],
        positions="relative",
        relative_buckets=config.get("relative_attention_num_buckets", int, 32),
        relative_distance=config.get("relative_attention_max_distance", int, 128),
        shared_embeddings=shared,
        decoder_start=start,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
    )


def _epsilon(config: Values) -> float:
    epsilon = config.get("layer_norm_epsilon", float, EPSILON)
    if not 0 < epsilon < 1:
        raise UserError(f"{config.path}: layer_norm_epsilon={epsilon} must be between 0 and 1")
    return epsilon


def _scales_output(config: Values) -> bool:
    """Returns whether the decoder's output is multiplied by 1 / sqrt(D).

    Newer files say so. In older ones, this is the case if the output has the table of the embeddings.
    """
    tied = config.get("model_type", str) == "t5" and config.get("tie_word_embeddings", bool, True)
    return config.get("scale_decoder_outputs", bool, tied)


def _vocabulary(config: Values, generation: Values) -> tuple[Side, str]:
    """Reads the vocabulary; returns it, and `model.decoder_start`.

    The table has more rows than the SentencePiece model has pieces: some for <extra_id_*>, in descending order, and
    others that are never used. They get pieces, too, because they have a share of the probability.
    """
    folder, size = config.path.parent, config.same("vocab_size")
    path = folder / "spiece.model"
    model = parse(path)
    names = [piece.piece for piece in model.pieces]
    tokenizer = read_values(folder / "tokenizer_config.json", required=False)
    extra = range(len(names), min(size, len(names) + tokenizer.get("extra_ids", int, EXTRA_IDS)))
    names += [f"<extra_id_{extra[-1] - index}>" for index in extra]
    names += [f"<unused_{index}>" for index in range(len(names), size)]
    if len(names) > size or len(set(names)) < size:
        raise UserError(f"{path}: its {len(model.pieces)} pieces do not fit the model's vocab_size={size}")
    unknown = next((index for index, each in enumerate(model.pieces) if each.type == each.UNKNOWN), -1)
    padding = config.get("pad_token_id", int, 0)
    ids = {"pad": padding, "eos": config.get("eos_token_id", int, 1), "unk": unknown}
    if len(set(ids.values())) < len(ids) or not all(0 <= index < size for index in ids.values()):
        raise UserError(f"{config.path}: the ids of padding, end and unknown piece are {ids}; they must be different")
    start = (config if "decoder_start_token_id" in config else generation).get("decoder_start_token_id", int, padding)
    if start not in ids.values():
        raise UserError(f"{config.path}: decoder_start_token_id={start} is not one of {ids}")
    special = [names[index] for index in ids.values()]
    side = make_side(model, {name: index for index, name in enumerate(names)}, special, [model], False)
    return side, next(name for name, index in ids.items() if index == start)


def _tables(weights: Tensors, config: Values) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the table of the embeddings and that of the output, or None if they are the same."""
    shape = config.same("vocab_size"), config.same("d_model")
    tables = [weights.take(name, *shape) for name in TABLES if name in weights] or [weights.take(TABLES[0], *shape)]
    if not all(np.array_equal(tables[0], table) for table in tables[1:]):
        raise UserError(f"{config.path.parent}: encoder and decoder have different embeddings, which is not supported")
    output = weights.take(OUTPUT, *shape) if OUTPUT in weights else tables[0]
    return tables[0], None if np.array_equal(tables[0], output) else output


def _stack(weights: Tensors, stack: str, model: ModelConfig, of: Mapping[str, np.float32]) -> dict[str, Any]:
    """Returns the layers of a stack, [L, ...] each, its last norm and its relative positions.

    Theirs are matrices [d_out, d_in]. `of`: see `export.t5.factors`.
    """
    width, inner, hidden = model.width, model.heads * model.key_width, model.ffn_width
    numbers = range(model.encoder_layers if stack == "encoder" else model.decoder_layers)

    def stacked(place: int, name: str, *shape: int) -> np.ndarray:
        return np.stack(
            [weights.take(f"{stack}.block.{layer}.layer.{place}.{name}.weight", *shape) for layer in numbers]
        )

    def matrix(place: int, name: str, d_in: int, d_out: int, kind: str = "") -> dict[str, np.ndarray]:
        kernel = np.ascontiguousarray(stacked(place, name, d_out, d_in).swapaxes(1, 2))
        return {"kernel": kernel * of[kind] if kind else kernel}

    layers: dict[str, Any] = {}
    for place, sublayer in enumerate(SUBLAYERS[stack]):
        block = BLOCKS[sublayer]
        if sublayer == "ffn":
            theirs = dict(GATED if model.gated else PLAIN)
            last = matrix(place, f"{block}.{theirs.pop('fc2')}", hidden, width, "last")
            first = {ours: matrix(place, f"{block}.{name}", width, hidden) for ours, name in theirs.items()}
            layers[sublayer] = first | {"fc2": last}
        else:
            first = {name: matrix(place, f"{block}.{name}", width, inner, "q" * (name == "q")) for name in "qkv"}
            layers[sublayer] = first | {"o": matrix(place, f"{block}.o", inner, width, "last")}
        layers[f"{sublayer}_pre_norm"] = {"scale": stacked(place, "layer_norm", width)}
    # Old files have a table in cross-attention that is not used.
    weights.drop(RELATIVE.format(stack, 1, BLOCKS["cross"]))
    name = RELATIVE.format(stack, 0, BLOCKS["self"])
    return {
        stack: layers,
        f"{stack}_norm": {"scale": weights.take(f"{stack}.final_layer_norm.weight", width)},
        f"{stack}_relative": weights.take(name, model.relative_buckets, model.heads),
    }
