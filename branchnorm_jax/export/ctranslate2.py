"""Export to CTranslate2: a folder that `ctranslate2.Translator` loads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.errors import MissingExtraError
from branchnorm_jax.export.fold import SUBLAYERS, Plain
from branchnorm_jax.model.embedding import STARTS, sinusoids
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH", "swiglu": "SWISH", "geglu_tanh": "GELUTanh"}
"""`model.activation` -> CTranslate2's name."""

SPECIAL = {"unk_token": "<unk>", "bos_token": "</s>", "eos_token": "</s>"}


def imported() -> Any:
    """Returns the ctranslate2 package. Raises `MissingExtraError` if it is not installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise MissingExtraError(f"export: {error}; run `pip install ctranslate2`") from error
    return ctranslate2


def obstacle(config: ModelConfig) -> str:
    """Returns the reason why `write` cannot represent a folded model, or "" if it can."""
    return "its positions are rotary" if config.positions == "rotary" else ""


def write(
    plain: Plain, config: ModelConfig, vocabularies: Sequence[list[str]], folder: Path, longest: int, quantization: str
) -> None:
    """Writes model.bin, config.json and the vocabularies to `folder`.

    Args:
      plain: the folded model.
      config: options of the model.
      vocabularies: pieces of the source and the target vocabulary.
      folder: existing folder.
      longest: maximum sequence length of the exported model.
      quantization: CTranslate2's name of the type of the weights (int8, float16, ...); "" for float32.
    """
    imported()
    from ctranslate2.specs import common_spec, transformer_spec

    options: dict[str, Any] = {
        "num_heads": config.heads,
        "pre_norm": plain.pre_norm,
        "activation": getattr(common_spec.Activation, ACTIVATIONS[config.activation]),
        "layernorm_embedding": bool(plain.embedding_norm),
        "relative_attention_bias": bool(plain.relative),
        "ffn_glu": config.gated,
        "rms_norm": config.norm == "rms_norm",
        "head_dim": config.key_width if config.heads * config.key_width != config.width else None,
    }
    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(config.encoder_layers, **options),
        transformer_spec.TransformerDecoderSpec(config.decoder_layers, **options),
    )
    root = float(config.width**0.5)
    for side, stack, part in (("source", "encoder", spec.encoder), ("target", "decoder", spec.decoder)):
        scale = plain.embedding_scale[stack].astype(np.float32)
        embedding = part.embeddings[0] if stack == "encoder" else part.embeddings
        # CTranslate2 supports only a scalar embedding scale; a vector is multiplied into the table.
        same = bool((scale == scale[0]).all())
        embedding.weight = plain.tables[side] if same else plain.tables[side] * scale
        part.scale_embeddings = root * float(scale[0]) if same else root
        if not plain.relative:
            positions = plain.positions or dict.fromkeys(STACKS, sinusoids(longest, config.width, config.positions))
            part.position_encodings.encodings = positions[stack][:longest] * scale
        if plain.embedding_norm:
            _norm(part.layernorm_embedding, plain.embedding_norm[stack])
        if plain.final:
            _norm(part.layer_norm, plain.final[stack])
        for index, layer in enumerate(part.layer):
            for name in SUBLAYERS[stack]:
                _sublayer(layer, name, plain.layers[stack], index)
            if plain.relative:
                layer.self_attention.relative_attention_bias = plain.relative[stack]
                layer.self_attention.relative_attention_max_distance = np.int32(config.relative_distance)
    spec.decoder.start_from_zero_embedding = config.decoder_start == "zero"
    spec.decoder.projection.weight = plain.tables["output"]
    spec.decoder.projection.bias = plain.bias
    for register, pieces in zip(
        (spec.register_source_vocabulary, spec.register_target_vocabulary), vocabularies, strict=True
    ):
        register(pieces)
    for name, token in SPECIAL.items():
        setattr(spec.config, name, token)
    spec.config.decoder_start_token = vocabularies[1][STARTS.get(config.decoder_start, EOS)]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    _tie(spec)
    # Not `spec.optimize`: it also compares every pair of arrays, which takes minutes for 1000 layers.
    spec._quantize(quantization or "float32")
    spec.save(str(folder))


def _tie(spec: Any) -> None:
    """Makes equal embedding tables share one array, so that they are stored only once."""
    named = {
        "decoder/embeddings/weight": spec.decoder.embeddings,
        "decoder/projection/weight": spec.decoder.projection,
        "encoder/embeddings_0/weight": spec.encoder.embeddings[0],
    }
    unique: dict[str, Any] = {}
    for name, part in named.items():
        equal = next((other for other, weight in unique.items() if weight.equal(part.weight)), None)
        if equal is None:
            unique[name] = part.weight
        else:
            part.weight = equal


def _sublayer(layer: Any, name: str, stack: dict[str, Any], index: int) -> None:
    part = {"self": "self_attention", "cross": "attention", "ffn": "ffn"}[name]
    spec, matrices = getattr(layer, part), stack[name]
    if name == "ffn":
        first = {"linear_0": "gate", "linear_0_noact": "fc1"} if "gate" in matrices else {"linear_0": "fc1"}
        for linear, matrix in {**first, "linear_1": "fc2"}.items():
            _linear(getattr(spec, linear), matrices, [matrix], index)
    else:
        groups = (["q", "k", "v"], ["o"]) if name == "self" else (["q"], ["k", "v"], ["o"])
        for linear, group in zip(spec.linear, groups, strict=True):
            _linear(linear, matrices, group, index)
    _norm(spec.layer_norm, {leaf: values[index] for leaf, values in stack[f"{name}_norm"].items()})


def _linear(spec: Any, matrices: dict[str, Any], group: list[str], index: int) -> None:
    """Sets a linear layer to the concatenated matrices of a group, [d_out, d_in]."""
    spec.weight = np.ascontiguousarray(np.concatenate([matrices[m]["kernel"][index].T for m in group]))
    spec.bias = np.concatenate([matrices[m]["bias"][index] for m in group])


def _norm(spec: Any, leaves: dict[str, np.ndarray]) -> None:
    """Sets a norm; RMSNorm has no bias."""
    spec.gamma = leaves["scale"]
    if "bias" in leaves:
        spec.beta = leaves["bias"]


def search_settings(config: DecodeConfig, longest: int) -> dict[str, Any]:
    """Returns the arguments of `Translator.translate_batch` for decoding options.

    CTranslate2 has a single length limit for all sentences, which is set to that of the longest source.

    Args:
      config: decoding options.
      longest: maximum sequence length, as in `write`.
    """
    return {
        "beam_size": config.beam_size,
        "length_penalty": config.length_penalty,
        "max_decoding_length": longest - 1,
        "no_repeat_ngram_size": config.no_repeat_ngram,
        "min_decoding_length": config.min_length,
        "max_input_length": config.max_input_length,
        "num_hypotheses": config.nbest,
    }


def log_probs(folder: Path, sources: Sequence[list[str]], targets: Sequence[list[str]]) -> list[np.ndarray]:
    """Returns the natural log-probabilities of the target tokens, final EOS included.

    `sources` and `targets` are pieces without EOS.
    """
    ctranslate2 = imported()
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="default")
    results = translator.score_batch(list(sources), list(targets), max_input_length=0, max_batch_size=32)
    return [np.array(result.log_probs) for result in results]
