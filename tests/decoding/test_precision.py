"""bfloat16 matrices in decoding: products and caches against NumPy, and what the search does with them."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from branchnorm_jax.decoding import engine, precision
from branchnorm_jax.decoding.engine import Engine, Query
from branchnorm_jax.model.attention import BITS, KVCache, attend_cached, loaded, stored
from branchnorm_jax.model.cache import Cache
from branchnorm_jax.model.incremental import start_cache, unstack_decoder
from branchnorm_jax.model.linear import product
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS

CONFIG = ModelConfig(width=32, heads=2, ffn_width=64, encoder_layers=2, decoder_layers=3, shared_embeddings="none")
MODEL = Transformer(CONFIG, 40, 40)
ALPHA = jnp.float32(0.3)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_a_product_rounds_both_sides_and_is_exact_otherwise() -> None:
    x, w = np.random.default_rng(0).normal(size=(2, 5, 5)).astype(np.float32)
    actual = product(x, (jnp.asarray(w, jnp.bfloat16),), ("embed", "ffn"), again=True)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, rounded(x) @ rounded(w), rtol=1e-5, atol=1e-6)


def test_a_cache_of_bits_holds_rounded_keys_and_values() -> None:
    draw = np.random.default_rng(0).normal
    q = jnp.asarray(draw(size=(2, 3, 2, 4)), jnp.float32)
    k, v = draw(size=(2, 2, 4, 6)), draw(size=(2, 2, 6, 4))
    bits = KVCache(stored(jnp.asarray(k), BITS), stored(jnp.asarray(v), BITS))
    exact = KVCache(*(jnp.asarray(rounded(x), jnp.float32) for x in (k, v)))
    assert (loaded(bits.k_BHKS, jnp.dtype(jnp.float32)) == exact.k_BHKS).all()
    mask = jnp.ones((2, 3, 6), bool)
    assert (attend_cached(q, bits, mask) == attend_cached(q, exact, mask)).all()


@pytest.fixture(scope="module")
def params() -> dict:
    params = jax.jit(MODEL.init)(jax.random.key(0))
    # Larger logits: otherwise an untrained model always repeats a word.
    params["embedding"]["output"] = 4 * params["embedding"]["output"]
    return params


def test_only_caches_of_a_loop_are_narrow(params: dict) -> None:
    memory = jnp.zeros((1, 4, 32))
    narrow = precision.narrowed(params)
    assert narrow["encoder"]["ffn"]["fc1"]["kernel"].dtype == jnp.bfloat16
    assert narrow["encoder"]["ffn"]["fc1"]["bias"].dtype == narrow["embedding"]["source"].dtype == jnp.float32
    looped, flat = (start_cache(MODEL, each, memory, 8) for each in (narrow, unstack_decoder(MODEL, narrow)))
    assert isinstance(looped, Cache) and isinstance(flat, list)
    assert {leaf.dtype for leaf in jax.tree.leaves(looped)} == {BITS}
    assert {leaf.dtype for leaf in jax.tree.leaves(flat)} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 12])
def test_scores_change_by_rounding_errors_only(params: dict, unroll: int) -> None:
    rng = np.random.default_rng(1)
    texts = [
        Query([*rng.integers(3, 40, length).tolist(), EOS], number) for number, length in enumerate([3, 9, 14, 20])
    ]
    # Greedy search, then the same tokens as a forced prefix.
    decode = DecodeConfig(beam_size=1, dtype="model", unroll=unroll, min_length=12, max_length_a=0.0, max_length_b=12)
    exact = dict(Engine((MODEL,), decode).search(((params, ALPHA),), texts))
    forced = [text._replace(prefix=exact[index].tokens[0, :12].tolist()) for index, text in enumerate(texts)]
    narrow = dict(Engine((MODEL,), dataclasses.replace(decode, dtype="bfloat16")).search(((params, ALPHA),), forced))
    for index in exact:
        assert exact[index].tokens[0, :12].tolist() == narrow[index].tokens[0, :12].tolist()
        difference = exact[index].token_log_probs[0, :12] - narrow[index].token_log_probs[0, :12]
        # Rounding has a relative error of 1/256, and logits of up to 10 are the sums of many products.
        assert 0 < abs(difference).max() < 10 * 2 / 256


@pytest.mark.parametrize(
    ("dtype", "width", "hypotheses", "native", "expected"),
    [
        ("auto", 512, 128, True, True),
        ("auto", 512, 128, False, False),
        ("auto", 512, 4, True, False),
        ("auto", 64, 128, True, False),
        ("model", 512, 128, True, False),
        ("bfloat16", 64, 1, False, True),
    ],
)
def test_when_matrices_are_narrow(
    monkeypatch: pytest.MonkeyPatch, dtype: str, width: int, hypotheses: int, native: bool, expected: bool
) -> None:
    monkeypatch.setattr(precision, "native_bfloat16", lambda: native)
    assert precision.narrows(DecodeConfig(dtype=dtype), ModelConfig(width=width), hypotheses) is expected
    # A sample does not depend on how many are drawn at once.
    sampling = DecodeConfig(dtype=dtype, temperature=1.0)
    assert precision.narrows(sampling, ModelConfig(width=width), hypotheses) is (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 avx512f", False), ("fpu avx512f avx512_bf16 sha", True), ("amx_tile amx_bf16", True)],
)
def test_the_flags_of_the_cpu_decide(monkeypatch: pytest.MonkeyPatch, flags: str, expected: bool) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    assert precision.native_bfloat16.__wrapped__() is expected


def test_large_batches_are_narrow_and_deep_decoders_then_stay_in_their_loop(
    params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "native_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "SMALLEST_WIDTH", 32)
    monkeypatch.setattr(engine, "UNROLLED", 1)
    monkeypatch.setattr(engine, "LONG", 4)
    searches = Engine((MODEL,), DecodeConfig(beam_size=4))
    for rows, tokens, dtype, flat in ((15, 100, jnp.float32, True), (16, 100, jnp.bfloat16, False)):
        ((ready, _),) = searches._ready(((params, ALPHA),), tokens, rows)
        decoder = ready["decoder"]
        assert isinstance(decoder, list) is flat
        kernel = (decoder[0] if flat else decoder)["ffn"]["fc1"]["kernel"]
        assert kernel.dtype == ready["encoder"]["ffn"]["fc1"]["kernel"].dtype == dtype
