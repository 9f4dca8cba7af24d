"""Dropout's statistics, scale and bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.dropout import Site, dropout, site_key


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("width", [64, 63])
def test_rate_and_scale(rate: float, width: int) -> None:
    x = jnp.ones((1000, width))
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    kept = y != 0
    # Five standard errors of a binomial share.
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / x.size)
    np.testing.assert_allclose(y[kept], 1 / (1 - rate), rtol=1e-3)
    np.testing.assert_allclose(np.unique(y[kept]).size, 1)


def test_neighbours_are_independent() -> None:
    """Two elements share a random word: their masks must not."""
    kept = np.asarray(dropout(jnp.ones((4000, 64)), 0.5, jax.random.key(1))) != 0
    for distance in (1, 2, 3):
        both = (kept[:, distance:] & kept[:, :-distance]).mean()
        assert abs(both - 0.25) < 5 * np.sqrt(0.25 * 0.75 / kept.size)


def test_off_without_key_or_rate() -> None:
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_sites_and_keys_draw_different_masks() -> None:
    key = jax.random.key(0)
    masks = {tuple(np.asarray(dropout(jnp.ones(64), 0.5, site_key(key, site)) != 0)) for site in Site}
    assert len(masks) == len(Site)
    once, again = (dropout(jnp.ones(64), 0.5, site_key(key, Site.FFN_BRANCH)) for _ in range(2))
    np.testing.assert_array_equal(once, again)
