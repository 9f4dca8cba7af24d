"""Export to Hugging Face: a folder that `MarianMTModel` and `MarianTokenizer` load."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS, UNUSED_BIAS, Plain, without_embedding_scale
from branchnorm_jax.model.embedding import STARTS
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS, PAD, UNK

NORMS = {"self": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
ATTENTION = {"self": "self_attn", "cross": "encoder_attn"}
OUT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
START = "<start>"
"""Piece for the first input of a decoder that starts from zeros, if PAD does not serve."""

TOKENS = {
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "forced_eos_token_id": EOS,
}


def obstacle(plain: Plain, config: ModelConfig) -> str:
    """Returns the reason why a model cannot be exported to Marian, or "" if it can."""
    first = plain.embedding_scale.values()
    obstacles = {
        "Marian supports only Post-LN": plain.pre_norm,
        "Marian has no norm after the embeddings": bool(plain.embedding_norm),
        f"MarianMTModel has other positions (model.positions=marian) than {config.positions}": config.positions
        != "marian",
        "the first skip connection has a factor per feature": any((scale != scale[0]).any() for scale in first),
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def write(
    plain: Plain,
    config: ModelConfig,
    decode: DecodeConfig,
    vocabularies: Sequence[list[str]],
    languages: tuple[str, str],
    folder: Path,
    longest: int,
) -> None:
    """Writes the weights, the configs and the JSON files of the tokenizer.

    The weights go to model.safetensors, the configs to config.json and generation_config.json.

    Args:
      plain: the folded model.
      config: options of the model.
      decode: decoding options.
      vocabularies: pieces of the source and the target vocabulary.
      languages: source and target language.
      folder: existing folder that contains source.spm and target.spm.
      longest: maximum sequence length of the exported model.
    """
    plain = without_embedding_scale(plain)
    start = STARTS.get(config.decoder_start, EOS)
    if config.decoder_start == "zero":
        start = PAD
        if plain.tables["target"][PAD].any():
            # Training has changed the row of PAD, so the decoder starts from a further row.
            plain, start = _with_zero_row(plain), len(plain.tables["target"])
            vocabularies = [[*pieces, START] for pieces in vocabularies]
    save_file(_weights(plain), folder / "model.safetensors")
    _json(folder / "config.json", _model_config(plain, config, start, longest))
    _json(folder / "generation_config.json", _generation_config(start, decode, longest))
    shared = plain.tables["source"] is plain.tables["target"]
    for name, pieces in zip(("vocab.json", "target_vocab.json"), vocabularies[: 1 if shared else 2], strict=False):
        _json(folder / name, {piece: index for index, piece in enumerate(pieces)})
    _json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "MarianTokenizer",
            "source_lang": languages[0],
            "target_lang": languages[1],
            "separate_vocabs": not shared,
            "model_max_length": longest,
            "unk_token": vocabularies[0][UNK],
            "eos_token": vocabularies[0][EOS],
            "pad_token": vocabularies[0][PAD],
        },
    )


def _weights(plain: Plain) -> dict[str, np.ndarray]:
    """Returns the parameters under the names of MarianMTModel; its matrices are [d_out, d_in]."""
    source, target, output = (plain.tables[name] for name in ("source", "target", "output"))
    weights = {"final_logits_bias": plain.bias[None]}
    if source is target is output:
        weights["model.shared.weight"] = target
    else:
        weights |= {"model.encoder.embed_tokens.weight": source, "model.decoder.embed_tokens.weight": target}
    if output is not target:
        weights["lm_head.weight"] = output
    for stack, sublayers in SUBLAYERS.items():
        tree = plain.layers[stack]
        for name in sublayers:
            matrices = {matrix: f"{ATTENTION[name]}.{OUT[matrix]}" for matrix in OUT} if name in ATTENTION else {}
            for matrix, theirs in (matrices or {"fc1": "fc1", "fc2": "fc2"}).items():
                for layer, kernel in enumerate(tree[name][matrix]["kernel"]):
                    prefix = f"model.{stack}.layers.{layer}.{theirs}"
                    weights |= {f"{prefix}.weight": kernel.T, f"{prefix}.bias": tree[name][matrix]["bias"][layer]}
            for layer, scale in enumerate(tree[f"{name}_norm"]["scale"]):
                prefix = f"model.{stack}.layers.{layer}.{NORMS[name]}"
                weights |= {f"{prefix}.weight": scale, f"{prefix}.bias": tree[f"{name}_norm"]["bias"][layer]}
    return {name: np.ascontiguousarray(array) for name, array in weights.items()}


def _model_config(plain: Plain, config: ModelConfig, start: int, longest: int) -> dict[str, Any]:
    source, target, output = (plain.tables[name] for name in ("source", "target", "output"))
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        # With an output table of its own, `transformers` does not find a table that the sides share.
        "share_encoder_decoder_embeddings": source is target is output,
        "tie_word_embeddings": output is target,
        "d_model": config.width,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.ffn_width,
        "decoder_ffn_dim": config.ffn_width,
        "activation_function": config.activation,
        "scale_embedding": True,
        "max_position_embeddings": longest,
        "dtype": "float32",
        **TOKENS,
        "decoder_start_token_id": start,
    }


def _generation_config(start: int, decode: DecodeConfig, longest: int) -> dict[str, Any]:
    return {
        "num_beams": decode.beam_size,
        "length_penalty": decode.length_penalty,
        "early_stopping": True,
        "max_length": longest,
        "min_new_tokens": decode.min_length,  # "min_length" would include the decoder start token
        "num_return_sequences": decode.nbest,
        "no_repeat_ngram_size": decode.no_repeat_ngram,
        "bad_words_ids": [[PAD]],
        **TOKENS,
        "decoder_start_token_id": start,
    }


def _with_zero_row(plain: Plain) -> Plain:
    """Appends a row of zeros to each table, for a piece with probability 0. Tables that are one array stay one."""
    longer = {id(table): np.concatenate([table, np.zeros_like(table[:1])]) for table in plain.tables.values()}
    tables = {name: longer[id(table)] for name, table in plain.tables.items()}
    return plain._replace(tables=tables, bias=np.append(plain.bias, np.float32(UNUSED_BIAS)))


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def log_probs(folder: Path, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[np.ndarray]:
    """Returns the natural log-probabilities of the target tokens in a folder that `transformers` loads.

    `sources` and `targets` are the folder's token ids, with EOS.

    Raises:
      UserError: if `transformers` or `torch` is not installed.
    """
    try:
        import torch
        from transformers import AutoModelForSeq2SeqLM
    except ImportError as error:
        raise UserError(f"{error}; run `pip install torch transformers`") from error
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    starts = model.config.decoder_start_token_id, model.generation_config.decoder_start_token_id
    # T5 models without this option start from padding.
    start = next((token for token in starts if token is not None), model.config.pad_token_id)
    results = []
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            inputs = torch.tensor([[start, *target[:-1]]])
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=inputs).logits
            picked = logits.log_softmax(-1)[0].gather(1, torch.tensor(target)[:, None])
            results.append(picked[:, 0].numpy())
    return results
