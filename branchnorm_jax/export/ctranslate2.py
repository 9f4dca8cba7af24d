"""CTranslate2: a folder that `ctranslate2.Translator` loads, with its SentencePiece models beside the weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS, Plain
from branchnorm_jax.model.embedding import sinusoids
from branchnorm_jax.options import DecodeConfig, ModelConfig

SPECIAL = {"unk_token": "<unk>", "bos_token": "</s>", "eos_token": "</s>", "decoder_start_token": "</s>"}


def imported() -> Any:
    """The engine. Raises `UserError` if it is not installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise UserError(f"export: {error}; run `pip install ctranslate2`") from error
    return ctranslate2


def write(
    plain: Plain, config: ModelConfig, vocabularies: Sequence[list[str]], folder: Path, longest: int, quantization: str
) -> None:
    """Writes model.bin, config.json and the vocabularies.

    Args:
      plain: the folded model.
      config: its options.
      vocabularies: pieces of source and target.
      folder: must exist.
      longest: positions that the model has room for.
      quantization: as CTranslate2 names it (int8, float16 ...); empty: float32.
    """
    imported()
    from ctranslate2.specs import common_spec, transformer_spec

    activation = {"relu": common_spec.Activation.RELU, "gelu": common_spec.Activation.GELU}[config.activation]
    depth = config.encoder_layers, config.decoder_layers
    spec = transformer_spec.TransformerSpec.from_config(
        depth, config.heads, pre_norm=plain.pre_norm, activation=activation
    )
    positions = sinusoids(longest, config.width, config.positions)
    root = float(config.width**0.5)
    for side, stack, part in (("source", "encoder", spec.encoder), ("target", "decoder", spec.decoder)):
        scale = plain.embedding_scale[stack].astype(np.float32)
        embedding = part.embeddings[0] if stack == "encoder" else part.embeddings
        # One factor goes into the engine's own; a vector needs a table of its own.
        same = bool((scale == scale[0]).all())
        embedding.weight = plain.tables[side] if same else plain.tables[side] * scale
        part.scale_embeddings = root * float(scale[0]) if same else root
        part.position_encodings.encodings = positions * scale
        if plain.final:
            _norm(part.layer_norm, plain.final[stack])
        for index, layer in enumerate(part.layer):
            for name in SUBLAYERS[stack]:
                _sublayer(layer, name, plain.layers[stack], index)
    spec.decoder.projection.weight = plain.tables["output"]
    spec.decoder.projection.bias = plain.bias
    for register, pieces in zip(
        (spec.register_source_vocabulary, spec.register_target_vocabulary), vocabularies, strict=True
    ):
        register(pieces)
    for name, token in SPECIAL.items():
        setattr(spec.config, name, token)
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    _tie(spec)
    # What `spec.optimize` does beside: it compares every pair of arrays, minutes at 1000 layers.
    spec._quantize(quantization or "float32")
    spec.save(str(folder))


def _tie(spec: Any) -> None:
    """Equal embedding tables are stored once, under the name that comes first."""
    named = {
        "decoder/embeddings/weight": spec.decoder.embeddings,
        "decoder/projection/weight": spec.decoder.projection,
        "encoder/embeddings_0/weight": spec.encoder.embeddings[0],
    }
    kept: dict[str, Any] = {}
    for name, part in named.items():
        equal = next((other for other, weight in kept.items() if weight.equal(part.weight)), None)
        if equal is None:
            kept[name] = part.weight
        else:
            part.weight = equal


def _sublayer(layer: Any, name: str, stack: dict[str, Any], index: int) -> None:
    part = {"self": "self_attention", "cross": "attention", "ffn": "ffn"}[name]
    spec, matrices = getattr(layer, part), stack[name]
    if name == "ffn":
        _linear(spec.linear_0, matrices, ["fc1"], index)
        _linear(spec.linear_1, matrices, ["fc2"], index)
    else:
        groups = (["q", "k", "v"], ["o"]) if name == "self" else (["q"], ["k", "v"], ["o"])
        for linear, group in zip(spec.linear, groups, strict=True):
            _linear(linear, matrices, group, index)
    _norm(spec.layer_norm, {leaf: values[index] for leaf, values in stack[f"{name}_norm"].items()})


def _linear(spec: Any, matrices: dict[str, Any], group: list[str], index: int) -> None:
    """Matrices side by side, [d_out, d_in]."""
    spec.weight = np.ascontiguousarray(np.concatenate([matrices[m]["kernel"][index].T for m in group]))
    spec.bias = np.concatenate([matrices[m]["bias"][index] for m in group])


def _norm(spec: Any, leaves: dict[str, np.ndarray]) -> None:
    spec.gamma, spec.beta = leaves["scale"], leaves["bias"]


def search_settings(config: DecodeConfig, longest: int) -> dict[str, Any]:
    """Arguments of `Translator.translate_batch` for the search of a config; `longest` as in `write`.

    Its limit is one number: a translation may be as long as that of the longest source.
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
    """Natural log-probability of each target token, the EOS at its end included; the pieces come without one."""
    ctranslate2 = imported()
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="default")
    found = translator.score_batch(list(sources), list(targets), max_input_length=0, max_batch_size=32)
    return [np.array(result.log_probs) for result in found]
