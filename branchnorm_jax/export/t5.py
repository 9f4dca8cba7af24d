"""Weights and options of T5ForConditionalGeneration. `importing/t5.py` reads the same format.

A Pre-LN Transformer with RMSNorm, relative positions and no biases. Three of its constants are in our parameters:

- Our scores have the factor 1 / sqrt(K), so our q is theirs times sqrt(K).
- Our epsilon is E = 1e-5, theirs e, as a rule 1e-6. With r = sqrt(E / e), RMSNorm_E(r x) = RMSNorm_e(x). So our
  residual stream is theirs times r: the embeddings and the last matrix of each branch.
- Our embeddings have the factor sqrt(D). If the output has the same table, the gain of the decoder's last norm makes
  up for the factors of the table. T5 multiplies the decoder's output by 1 / sqrt(D), T5 v1.1 and later do not.
"""

from typing import Any

import numpy as np

from branchnorm_jax.export.fold import SUBLAYERS, Plain
from branchnorm_jax.options import ModelConfig

BLOCKS = {"self": "SelfAttention", "cross": "EncDecAttention", "ffn": "DenseReluDense"}

GATED, PLAIN = {"gate": "wi_0", "fc1": "wi_1", "fc2": "wo"}, {"fc1": "wi", "fc2": "wo"}
"""Our matrices of the feed-forward sub-layer -> theirs."""

SHARED = "shared.weight"
"""Name of the embedding table."""

OUTPUT = "lm_head.weight"
"""Name of the output table, if it is another one."""

RELATIVE = "{}.block.0.layer.{}.{}.relative_attention_bias.weight"

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "swish": "silu",
    "geglu_tanh": "gated-gelu",
    "swiglu": "gated-silu",
}
"""`model.activation` -> feed_forward_proj in config.json."""

OUR_EPSILON, EPSILON = 1e-5, 1e-6
"""Epsilon of our norms, and of T5's."""


def factors(width: int, head_width: int, epsilon: float, tied: bool, scaled: bool) -> dict[str, np.float32]:
    """Returns our parameters divided by theirs, by kind; other kinds are the same.

    The kinds are "embedding", "output" and "decoder_norm", "q", and "last": the last matrix of a branch.

    Args:
      width: D.
      head_width: K.
      epsilon: e.
      tied: the output has the table of the embeddings.
      scaled: theirs multiplies the decoder's output by 1 / sqrt(D).
    """
    stream = (OUR_EPSILON / epsilon) ** 0.5
    table, output = np.float32(stream * width**-0.5), np.float32(width**-0.5 if scaled else 1.0)
    return {
        "embedding": table,
        "decoder_norm": output / table if tied else np.float32(1.0),
        "output": output,
        "q": np.float32(head_width**0.5),
        "last": np.float32(stream),
    }


def weights(plain: Plain, config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the parameters under their names; their matrices are [d_out, d_in]."""
    tied = is_tied(plain)
    of = factors(config.width, config.key_width, EPSILON, tied, scaled=tied)
    found = {SHARED: divided(plain.tables["source"], of["embedding"])}
    if not tied:
        found[OUTPUT] = divided(plain.tables["output"], of["output"])
    for stack, sublayers in SUBLAYERS.items():
        layers = plain.layers[stack]
        for place, name in enumerate(sublayers):
            matrices = (GATED if config.gated else PLAIN) if name == "ffn" else {each: each for each in "qkvo"}
            for ours, theirs in matrices.items():
                factor = of["q"] if ours == "q" else of["last"] if ours in ("o", "fc2") else np.float32(1.0)
                for layer, kernel in enumerate(layers[name][ours]["kernel"]):
                    path = f"{stack}.block.{layer}.layer.{place}.{BLOCKS[name]}.{theirs}.weight"
                    found[path] = divided(kernel.T, factor)
            for layer, scale in enumerate(layers[f"{name}_norm"]["scale"]):
                found[f"{stack}.block.{layer}.layer.{place}.layer_norm.weight"] = scale
        last = of["decoder_norm"] if stack == "decoder" else np.float32(1.0)
        found[f"{stack}.final_layer_norm.weight"] = divided(plain.final[stack]["scale"], last)
        found[RELATIVE.format(stack, 0, BLOCKS["self"])] = plain.relative[stack]
    return found


def settings(plain: Plain, config: ModelConfig) -> dict[str, Any]:
    """Returns the options of the network in config.json."""
    tied = is_tied(plain)
    return {
        "vocab_size": len(plain.tables["source"]),
        "d_model": config.width,
        "d_kv": config.key_width,
        "d_ff": config.ffn_width,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.heads,
        "feed_forward_proj": ACTIVATIONS[config.activation],
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "layer_norm_epsilon": EPSILON,
        "dropout_rate": config.dropout,
        # Old versions of `transformers` know the first option only, and new ones set it to True.
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied,
    }


def is_tied(plain: Plain) -> bool:
    """Returns whether the output has the table of the embeddings."""
    return bool(np.array_equal(plain.tables["source"], plain.tables["output"]))


def divided(array: np.ndarray, factor: np.float32) -> np.ndarray:
    """Returns the float32 x with x * factor = array, rounding included, or a nearest number if there is none.

    An import multiplies by the factor, so it finds the same numbers again.

    >>> ours = np.float32(0.1) * np.arange(1, 1000, dtype=np.float32) * np.float32(0.7)
    >>> bool((divided(ours, np.float32(0.7)) * np.float32(0.7) == ours).all())
    True
    """
    found = (array / factor).astype(np.float32)
    for end in (np.float32(-np.inf), np.float32(np.inf)):
        near = np.nextafter(found, end)
        found = np.where((found * factor != array) & (near * factor == array), near, found)
    return found
