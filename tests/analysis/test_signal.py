"""Compares signal propagation with known properties of the methods and with the definition of the derivative."""

import csv
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.analysis import signal
from branchnorm_jax.model.taps import Taps
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.training.state import Batch
from branchnorm_jax.training.step import loss_sums
from tests.conftest import TINY, run_main

BATCH = Batch(jnp.array([[5, 6, 7, 1], [9, 8, 1, 0]]), jnp.array([[4, 5, 1], [7, 8, 1]]))
ONE = jnp.float32(1.0)


def make(method: str, layers: int = 3) -> tuple[Config, Transformer]:
    model = ModelConfig(method=method, encoder_layers=layers, decoder_layers=2, width=8, ffn_width=12, heads=2)
    return Config(model=model), Transformer(model, 20, 20)


@pytest.mark.slow
def test_rezero_starts_as_the_identity_with_zero_encoder_gradient() -> None:
    config, model = make("rezero", 30)
    result = signal.measure(config, model, model.init(jax.random.key(0)), ONE, BATCH)
    np.testing.assert_allclose(result.singular_values, 1.0, atol=1e-6)
    assert result.singular_values.shape == (4 * 8,)
    np.testing.assert_allclose(result.gradient["decoder"], result.gradient["decoder"][0], rtol=1e-6)
    assert result.gradient["decoder"][0] > 0
    np.testing.assert_array_equal(result.gradient["encoder"], np.zeros(30))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["post_ln", "pre_ln"])
def test_gradient_norm_is_the_steepest_slope(method: str) -> None:
    """Along the gradient the loss changes by |gradient| per unit of length, along any other direction by less."""
    config, model = make(method)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, label_smoothing=0.0))
    params = model.init(jax.random.key(0))
    result = signal.measure(config, model, params, ONE, BATCH)

    @jax.jit
    def loss(probe: jax.Array, layer: int) -> jax.Array:
        probes = {"decoder": jnp.zeros((2, 2, 3, 8)).at[layer].set(probe)}
        sums, _ = loss_sums(model, params, BATCH, ONE, 0.0, taps=Taps(probes))
        return sums.loss / sums.tokens

    for layer in range(2):
        steps = 1e-2 * np.eye(48, dtype=np.float32).reshape(48, 2, 3, 8)
        slopes = [(loss(step, layer) - loss(-step, layer)) / 2e-2 for step in steps]
        np.testing.assert_allclose(np.linalg.norm(slopes), result.gradient["decoder"][layer], rtol=1e-3)


def test_update_size_equals_adams_first_step() -> None:
    """Adam's first step has the size of the learning rate in every coordinate that has a gradient."""
    config, model = make("post_ln")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, weight_decay=0.0, adam_eps=1e-30))
    params = model.init(jax.random.key(0))
    result = signal.measure(config, model, params, ONE, BATCH)
    leaves = jax.tree.leaves(params["encoder"])
    # The biases of the keys shift all scores of a query equally, so their gradient is zero up to rounding.
    count = sum(leaf[0].size for leaf in leaves)
    weights = np.sqrt(sum(np.square(leaf[1]).sum() for leaf in leaves))
    largest = config.train.learning_rate * np.sqrt(count) / weights
    assert 0.8 * largest < result.update["encoder"][1] <= largest * (1 + 1e-5)
    # The singular values are those of the first stack, and signal.csv says so.
    assert {line.split(",")[2] for line in signal.to_csv({"x": result}).splitlines() if "singular" in line} == {
        "encoder"
    }


@pytest.mark.slow
def test_analyze_mode_compares_untrained_methods_and_measures_a_trained_run(tmp_path: Path, trained: Path) -> None:
    options = [option for option in TINY if not option.startswith("--config.train")]
    fresh = run_main("--mode=analyze", *options, "--config.analyze.methods=post_ln, rezero", f"--workdir={tmp_path}")
    assert fresh.returncode == 0, fresh.stderr
    with (tmp_path / "signal.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {"post_ln", "rezero"}
    assert {row["quantity"] for row in rows} == {"gradient", "update", "singular_value"}
    assert {row["stack"] for row in rows if row["quantity"] == "singular_value"} == {"encoder"}
    assert (tmp_path / "signal.png").read_bytes().startswith(b"\x89PNG")
    wrong = run_main("--mode=analyze", *options, "--config.analyze.methods=rezera", f"--workdir={tmp_path}")
    assert wrong.returncode == 2 and "rezera" in wrong.stderr
    run = run_main("--mode=analyze", f"--workdir={trained}")
    assert run.returncode == 0, run.stderr
    for name in ("curves", "layers", "factors", "signal"):
        assert (trained / f"{name}.png").exists()
