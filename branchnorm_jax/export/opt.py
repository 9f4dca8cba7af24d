"""Export of a language model to Hugging Face: a folder for `OPTForCausalLM`; `AutoTokenizer` loads it for bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.errors import MissingExtraError
from branchnorm_jax.export import bart
from branchnorm_jax.export.fold import Plain
from branchnorm_jax.export.huggingface import generation_config
from branchnorm_jax.export.weights import save
from branchnorm_jax.model.embedding import sinusoids
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS, PAD

FINAL = "model.decoder.layer_norm.", "model.decoder.final_layer_norm."
"""Names of the norm after the last layer in BART and in OPT. Otherwise the names of the parameters are the same."""


def obstacle(plain: Plain, config: ModelConfig) -> str:
    """Returns the reason why OPTForCausalLM cannot represent a folded model, or "" if it can."""
    obstacles = {
        "it has relative positions": config.positions in ("relative", "rotary"),
        "a norm follows its embeddings": bool(plain.embedding_norm),
        "some of its pieces have probability 0 (model.mask_unused)": bool(plain.unused),
        "its logits have a bias": bool(plain.bias.any()),
        "its attention heads are not model.width / model.heads wide": config.heads * config.key_width != config.width,
        f"its norms are {config.norm}": config.norm != "layer_norm",
        f"its activation is {config.activation}": config.activation not in ("relu", "gelu", "swish"),
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def write(plain: Plain, config: ModelConfig, decode: DecodeConfig, folder: Path, context: int, in_bytes: bool) -> None:
    """Writes the weights, the configs and, for a vocabulary of bytes, the config of the tokenizer.

    Sinusoidal positions are written as a table. The scale of the embeddings is part of the tables.

    Args:
      plain: the folded model.
      config: options of the model.
      decode: options of generation.
      folder: existing folder.
      context: maximum number of tokens of a text.
      in_bytes: whether the vocabulary consists of bytes. `ByT5Tokenizer` has the same ids.
    """
    scale = plain.embedding_scale["decoder"]
    learned = plain.positions.get("decoder")
    positions = sinusoids(context, config.width, config.positions) if learned is None else learned
    plain = plain._replace(positions={"decoder": (positions * scale).astype(np.float32)})
    weights = {name.replace(*FINAL): array for name, array in bart.weights(plain).items()}
    weights[bart.TARGET] = (plain.tables["target"] * config.width**0.5 * scale).astype(np.float32)
    weights[bart.OUTPUT] = plain.tables["output"]
    save(weights, folder)
    tokens = {"pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS}
    settings = {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "dtype": "float32",
        "vocab_size": len(plain.tables["target"]),
        "hidden_size": config.width,
        "word_embed_proj_dim": config.width,
        "num_hidden_layers": config.decoder_layers,
        "num_attention_heads": config.heads,
        "ffn_dim": config.ffn_width,
        "activation_function": config.activation,
        "do_layer_norm_before": plain.pre_norm,
        "_remove_final_layer_norm": not plain.final,
        "max_position_embeddings": len(positions),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": False,
    }
    # transformers prefers max_new_tokens, which does not know the length of the prompt.
    search = generation_config(decode, context, PAD)
    if decode.temperature:
        sampling = {"temperature": decode.temperature, "top_k": decode.top_k, "top_p": decode.top_p}
        no_beam = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
        search |= {"do_sample": True} | sampling | no_beam
    _json(folder / "config.json", settings | tokens)
    _json(folder / "generation_config.json", search | tokens)
    if in_bytes:
        _json(folder / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0})


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def log_probs(folder: Path, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the natural log-probability of each token but the first, in a folder that `transformers` loads.

    Raises:
      UserError: if `transformers` or `torch` is not installed.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError(f"{error}; run `pip install torch transformers`") from error
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    with torch.no_grad():
        for text in texts:
            tokens = torch.tensor(text.astype(np.int64))[None]
            picked = model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)[0].gather(1, tokens[0, 1:, None])
            results.append(picked[:, 0].numpy())
    return results
