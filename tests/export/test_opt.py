"""Language models in Hugging Face's OPTForCausalLM: the same log-probabilities, tokens and text."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.export import fold, opt
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS
from tests.model.test_reference import random_params

pytest.importorskip("transformers")

SIZES: dict[str, Any] = dict(encoder_layers=0, decoder_layers=3, width=8, ffn_width=12, heads=2, dropout=0.0)
ALPHA = jnp.float32(0.4)


def network(**options: Any) -> Transformer:
    return Transformer(ModelConfig(family="decoder", **SIZES | options), 259, 259, (7,) * ("mask_unused" in options))


def written(model: Transformer, folder: Path, **decode: Any) -> Any:
    """Exports random parameters; returns them."""
    params = random_params(model, "float32")
    plain = fold.fold(model, params, ALPHA)
    assert opt.obstacle(plain, model.config) == ""
    opt.write(plain, model.config, DecodeConfig(**{"beam_size": 1} | decode), folder, 16, in_bytes=True)
    return params


@pytest.mark.parametrize(
    "options",
    [
        {"method": "branchnorm"},
        {"method": "deepnorm", "activation": "gelu", "positions": "fairseq"},
        {"method": "admin", "positions": "learned", "max_positions": 16},
        {"method": "pre_ln", "shared_embeddings": "none", "activation": "swish"},
        {"method": "layerscale", "positions": "learned", "max_positions": 16},
    ],
    ids=lambda options: options["method"],
)
def test_log_probabilities_are_equal(options: Any, tmp_path: Path) -> None:
    model = network(**options)
    params = written(model, tmp_path)
    rng = np.random.default_rng(0)
    texts = [np.array([EOS, *rng.integers(3, 259, length)]) for length in (1, 9, 16)]
    for text, theirs in zip(texts, opt.log_probs(tmp_path, texts), strict=True):
        inputs = jnp.asarray(text[None, :-1], jnp.int32)
        log_probs = np.asarray(jax.nn.log_softmax(model(params, inputs, inputs, ALPHA)[0]))
        np.testing.assert_allclose(theirs, log_probs[np.arange(len(text) - 1), text[1:]], atol=2e-5)


def test_search_options_are_exported(tmp_path: Path) -> None:
    model = network(method="branchnorm", positions="learned", max_positions=64)
    written(model, tmp_path, beam_size=4, length_penalty=2.0, no_repeat_ngram=3, min_length=5, nbest=2)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    expected = {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_new_tokens": 5}
    assert expected.items() <= found.items()
    assert (found["num_return_sequences"], found["max_length"], "do_sample" in found) == (2, 16, False)
    written(model, tmp_path, beam_size=4, nbest=2, temperature=0.7, top_k=9)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    expected = {"do_sample": True, "temperature": 0.7, "top_k": 9, "num_beams": 1, "num_return_sequences": 2}
    assert expected.items() <= found.items()


def test_tokenizer_and_generation_are_theirs(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = network(method="branchnorm")
    params = written(model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "é\n a"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == [3 + byte for byte in text.encode()]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = loaded.generate(torch.tensor([[EOS, *ids]]))[0].tolist()
    assert len(theirs) == 16  # the context
    ours = [EOS, *ids]
    while len(ours) < len(theirs):
        inputs = jnp.array([ours])
        ours.append(int(model(params, inputs, inputs, ALPHA)[0, -1].argmax()))
    assert ours == theirs


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "pre_ln", "positions": "rotary"}, "relative positions"),
        ({"method": "pre_ln", "positions": "relative"}, "relative positions"),
        ({"method": "branchnorm", "output_bias": True}, "logits have a bias"),
        ({"method": "branchnorm", "mask_unused": True}, "model.mask_unused"),
        ({"method": "peri_ln"}, "norms after its branches"),
        ({"method": "pre_ln", "activation": "swiglu"}, "activation is swiglu"),
    ],
)
def test_other_models_are_refused(options: Any, reason: str) -> None:
    model = network(**options)
    found = fold.obstacle(model)
    if not found:
        found = opt.obstacle(fold.fold(model, random_params(model, "float32"), ALPHA), model.config)
    assert reason in found
