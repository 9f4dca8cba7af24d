"""Statistics, scale and random bits of dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.blocks import LayerInput, make_block
from branchnorm_jax.model.coefficients import Coefficients
from branchnorm_jax.model.dropout import Site, dropout, random_bits, site_key
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.streams import Stream
from branchnorm_jax.options import ModelConfig


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("width", [64, 63])
def test_rate_and_scale_of_dropout(rate: float, width: int) -> None:
    x = jnp.ones((1000, width))
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    kept = y != 0
    # Five standard errors of a binomial proportion.
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / x.size)
    np.testing.assert_allclose(y[kept], 1 / (1 - rate), rtol=1e-6)
    np.testing.assert_allclose(np.unique(y[kept]).size, 1)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 3, 16, 32])
def test_neighbouring_elements_are_independent(axis: int, distance: int) -> None:
    kept = np.asarray(dropout(jnp.ones((64, 64, 64)), 0.5, jax.random.key(1))) != 0
    kept = np.moveaxis(kept, axis, 0)
    both = (kept[distance:] & kept[:-distance]).mean()
    assert abs(both - 0.25) < 5 * np.sqrt(0.25 * 0.75 / kept.size)


def test_masks_of_related_keys_are_independent() -> None:
    """Steps, layers and sites fold small numbers into one key; their masks are neither correlated nor permutations."""
    keys = [jax.random.fold_in(jax.random.key(0), index) for index in range(40)]
    kept = np.stack([np.asarray(dropout(jnp.ones(4096), 0.5, key)) != 0 for key in keys])
    shares = np.corrcoef(kept)[np.triu_indices(40, 1)]
    assert np.abs(shares).max() < 5 / np.sqrt(4096)
    # Permutations of one mask would all have the same number of ones.
    assert len(set(kept.sum(1))) > 20


def test_bits_are_uniform() -> None:
    """Each of the 32 bits is set half of the time, and each byte takes its 256 values equally often."""
    bits = np.asarray(random_bits(jax.random.key(3), (1000, 1000)))
    for place in range(32):
        assert abs(((bits >> place) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
    for place in (0, 8, 16, 24):
        counts = np.bincount(((bits >> place) & 0xFF).ravel(), minlength=256)
        chi_square = ((counts - bits.size / 256) ** 2 / (bits.size / 256)).sum()
        assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def test_rows_of_a_mask_do_not_repeat() -> None:
    masks = np.asarray(dropout(jnp.ones((2000, 64)), 0.5, jax.random.key(5))) != 0
    assert len({row.tobytes() for row in masks}) == 2000


def test_gradient_has_the_same_mask() -> None:
    x, key = jnp.linspace(1, 2, 100), jax.random.key(2)
    y, gradient = jax.value_and_grad(lambda x: (dropout(x, 0.3, key) * jnp.arange(100)).sum())(x)
    kept = np.asarray(dropout(x, 0.3, key)) != 0
    np.testing.assert_allclose(gradient, np.where(kept, np.arange(100) / 0.7, 0.0), rtol=1e-6)
    np.testing.assert_allclose(y, (gradient * x).sum(), rtol=1e-5)


def test_bfloat16_branches_are_scaled_exactly() -> None:
    """A divisor rounded to bfloat16 would make every training activation a sixth of a percent too small."""
    config = ModelConfig(width=16, ffn_width=16, heads=1, dtype="bfloat16", dropout=0.1, init="")
    block = make_block(config, METHODS["pre_ln"], "encoder")
    x, one = jax.random.normal(jax.random.key(0), (2, 5, 16)), jnp.ones(())
    layer, mask = LayerInput(Coefficients(one, one, one, one > 0)), jnp.ones((2, 1, 5), bool)
    params = block.init(jax.random.key(1), Stream(x), layer, mask)["params"]
    # Tests attention alone: with zero weights and bias, the feed-forward sub-layer adds nothing.
    params["ffn"]["fc2"] = jax.tree.map(jnp.zeros_like, params["ffn"]["fc2"])
    plain, dropped = (
        block.apply({"params": params}, Stream(x), layer._replace(key=key), mask)[0].x - x
        for key in (None, jax.random.key(2))
    )
    kept = np.asarray(jnp.abs(dropped) > 1e-6)
    np.testing.assert_allclose(np.median(np.asarray(dropped)[kept] / np.asarray(plain)[kept]), 1 / 0.9, rtol=1e-5)


def test_dropout_is_off_without_key_or_rate() -> None:
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_sites_have_different_reproducible_masks() -> None:
    key = jax.random.key(0)
    masks = {tuple(np.asarray(dropout(jnp.ones(64), 0.5, site_key(key, site)) != 0)) for site in Site}
    assert len(masks) == len(Site)
    once, again = (dropout(jnp.ones(64), 0.5, site_key(key, Site.FFN_BRANCH)) for _ in range(2))
    np.testing.assert_array_equal(once, again)
