"""Weights and options of the models of BART's family under Hugging Face's names.

These are MarianMTModel, BartForConditionalGeneration, FSMTForConditionalGeneration (fairseq's Post-LN Transformer),
M2M100ForConditionalGeneration and MBartForConditionalGeneration. `importing/bart.py` reads the same format.
"""

from typing import Any

import numpy as np

from branchnorm_jax.export.fold import SUBLAYERS, Plain
from branchnorm_jax.model.embedding import sinusoids
from branchnorm_jax.options import ModelConfig

NORMS = {"self": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
ATTENTION = {"self": "self_attn", "cross": "encoder_attn"}
OUT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}

SHARED = "model.shared.weight"
SOURCE = "model.encoder.embed_tokens.weight"
TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
PROJECTION = "model.decoder.output_projection.weight"
"""FSMT's name of the output table."""

POSITIONS = "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"
"""Names of the positions of the encoder and of the decoder."""

OFFSET = 2
"""Row of the first position in a table of learned positions: after that of <pad>, whose id is 1."""


def tables(plain: Plain, model_type: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the embedding tables under their names, and the options that tell which of them are shared.

    In MarianMTModel, target and output can share a table that is not the source's. The other classes have one table or
    three.
    """
    source, target, output = (plain.tables[name] for name in ("source", "target", "output"))
    shared = source is target is output
    if model_type == "fsmt":
        sizes = {"src_vocab_size": len(source), "tgt_vocab_size": len(target)}
        return {SOURCE: source, TARGET: target, PROJECTION: output}, sizes | {"tie_word_embeddings": False}
    if shared:
        found = {SHARED: source}
    elif model_type == "marian":
        found = {SOURCE: source, TARGET: target} | ({} if output is target else {OUTPUT: output})
    else:
        # They load the first table, but do not use it.
        found = {SHARED: source, SOURCE: source, TARGET: target, OUTPUT: output}
    options: dict[str, Any] = {"vocab_size": len(source), "tie_word_embeddings": shared}
    if model_type == "marian":
        options |= {
            "decoder_vocab_size": len(target),
            # With an output table of its own, MarianMTModel does not find a table that the sides share.
            "share_encoder_decoder_embeddings": shared,
            "tie_word_embeddings": output is target,
        }
    return found, options


def weights(plain: Plain) -> dict[str, np.ndarray]:
    """Returns the other parameters under their names; their matrices are [d_out, d_in]."""
    found: dict[str, np.ndarray] = {}
    for stack, tree in plain.layers.items():
        for name in (each for each in SUBLAYERS[stack] if each in tree):
            matrices = {matrix: f"{ATTENTION[name]}.{OUT[matrix]}" for matrix in OUT} if name in ATTENTION else {}
            for matrix, theirs in (matrices or {"fc1": "fc1", "fc2": "fc2"}).items():
                for layer, kernel in enumerate(tree[name][matrix]["kernel"]):
                    prefix = f"model.{stack}.layers.{layer}.{theirs}"
                    found |= {f"{prefix}.weight": kernel.T, f"{prefix}.bias": tree[name][matrix]["bias"][layer]}
            for layer, scale in enumerate(tree[f"{name}_norm"]["scale"]):
                prefix = f"model.{stack}.layers.{layer}.{NORMS[name]}"
                found |= {f"{prefix}.weight": scale, f"{prefix}.bias": tree[f"{name}_norm"]["bias"][layer]}
    norms = {"layer_norm": plain.final, "layernorm_embedding": plain.embedding_norm}
    for name, stack in ((name, stack) for name, each in norms.items() for stack in each):
        leaves = norms[name][stack]
        found |= {f"model.{stack}.{name}.weight": leaves["scale"], f"model.{stack}.{name}.bias": leaves["bias"]}
    for stack, table in plain.positions.items():
        before = np.zeros((OFFSET, table.shape[1]), np.float32)
        found[f"model.{stack}.embed_positions.weight"] = np.concatenate([before, table])
    return found


def settings(config: ModelConfig, longest: int) -> dict[str, Any]:
    """Returns the other options of the network in config.json; `longest` is the maximum sequence length."""
    return {
        "d_model": config.width,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.ffn_width,
        "decoder_ffn_dim": config.ffn_width,
        "activation_function": config.activation,
        "scale_embedding": True,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "max_position_embeddings": longest,
    }


def positions(length: int, width: int) -> np.ndarray:
    """Returns the sinusoids of Marian itself, [length, width]. In a file they replace those of MarianMTModel."""
    return sinusoids(length, width, "tensor2tensor")
