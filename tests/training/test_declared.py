"""A parameter is declared once. Everything else about it follows from the declaration."""

from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branchnorm_jax.model import blocks, transformer
from branchnorm_jax.model.declared import declared
from branchnorm_jax.model.feedforward import FeedForward
from branchnorm_jax.model.recipe import Depth, PerStack
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig, ParallelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import abstract_params, first_state

LAYERS, WIDTH, FFN_WIDTH = 3, 4, 8


def by_layer(depth: Depth) -> PerStack:
    return PerStack((1.0, 2.0, 3.0), 0.5)


class Slopes(FeedForward):
    """A feed-forward sub-layer that declares one more parameter, a factor on its input."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        slopes = self.param("slopes", declared(nn.initializers.ones, "embed", gain=by_layer), (self.config.width,))
        return super().__call__(slopes * x_BTD, key)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Transformer, int]]:
    """Returns a model with the new parameter, and the number of parameters without it."""
    config = ModelConfig(encoder_layers=LAYERS, decoder_layers=LAYERS, width=WIDTH, ffn_width=FFN_WIDTH, heads=1)
    model = Transformer(config, 8, 8)
    plain = sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params()))
    monkeypatch.setattr(blocks, "FeedForward", Slopes)
    # A model is declared once, and the declaration of these would change.
    transformer._declaration.cache_clear()
    yield model, plain
    transformer._declaration.cache_clear()


def test_new_parameters_need_only_one_declaration(models: tuple[Transformer, int], tmp_path: Path) -> None:
    model, plain = models
    params = jax.jit(model.init)(jax.random.key(0))
    # Initial values by layer, and the number of parameters.
    np.testing.assert_array_equal(params["encoder"]["ffn"]["slopes"], np.outer([1, 2, 3], np.ones(WIDTH)))
    np.testing.assert_array_equal(params["decoder"]["ffn"]["slopes"], np.full((LAYERS, WIDTH), 0.5))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == plain + 2 * LAYERS * WIDTH
    # Logical axes and sharding.
    assert model.logical_axes()["encoder"]["ffn"]["slopes"] == ("layers", "embed")
    sharded = abstract_params(model, make_mesh(ParallelConfig(data=jax.device_count())))
    assert sharded["encoder"]["ffn"]["slopes"].sharding.spec == jax.sharding.PartitionSpec(None, None)
    # Weight decay: p <- p - rate 0.1 p, with a gradient of zero.
    train = TrainConfig(optimizer="adamw", weight_decay=0.1, clip_norm=0.0)
    state = first_state(params, make_optimizer(train))
    direction, _ = make_optimizer(train).update(jax.tree.map(jnp.zeros_like, params), state.opt_state, params)
    np.testing.assert_allclose(direction["encoder"]["ffn"]["slopes"], 0.1 * params["encoder"]["ffn"]["slopes"])
    # Checkpoints include the parameter.
    changed = optax.tree.add_scale(params, 0.5, params)
    checkpoints = Checkpoints(tmp_path, train, lambda line: None)
    checkpoints.save(first_state(changed, make_optimizer(train)), jnp.float32(1.0), {}, None)
    checkpoints.close()
    restored, _, _ = Checkpoints(tmp_path, train, lambda line: None, read_only=True).restore_params("last", sharded)
    np.testing.assert_array_equal(restored["encoder"]["ffn"]["slopes"], 1.5 * params["encoder"]["ffn"]["slopes"])
    # The parameter affects the output and has a gradient.
    tokens = jnp.array([[4, 5, 2]])
    gradient = jax.jit(jax.grad(lambda params: model(params, tokens, tokens, jnp.ones(()))[..., 4].sum()))(params)
    assert float(jnp.abs(gradient["encoder"]["ffn"]["slopes"]).min(axis=1).max()) > 0
