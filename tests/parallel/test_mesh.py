"""Shardings of the parameters, and rejected meshes. tests/training/ tests training on 8 devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from branchnorm_jax.errors import UserError
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig, ParallelConfig
from branchnorm_jax.parallel.mesh import LOGICAL_RULES, make_mesh, shard_tree, to_devices


@pytest.mark.parametrize("method", ["post_ln", "pre_ln"])
def test_every_parameter_has_a_name_for_each_axis(method: str) -> None:
    model = Transformer(ModelConfig(method=method, activation="swiglu"), 100, 100)
    params = model.abstract_params()
    for leaf, names in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple)),
        strict=True,
    ):
        assert len(names) == leaf.ndim
        assert set(names) <= set(LOGICAL_RULES)


def test_matrices_are_split_over_the_model_axis_if_divisible() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"))
    config = ModelConfig(width=6, heads=2, ffn_width=9, encoder_layers=2, decoder_layers=2)
    model = Transformer(config, 100, 100)
    params = model.abstract_params()
    specs = jax.tree.map(lambda split: split.spec, shard_tree(mesh, params, model.logical_axes()))  # type: ignore[arg-type]
    assert specs["embedding"]["shared"] == PartitionSpec("model", None)
    assert specs["encoder"]["self"]["q"]["kernel"] == PartitionSpec(None, None, "model")
    assert specs["encoder"]["self"]["o"]["kernel"] == PartitionSpec(None, "model", None)
    # 9 features cannot be halved.
    assert specs["encoder"]["ffn"]["fc1"]["kernel"] == PartitionSpec(None, None, None)


def test_unsuitable_meshes_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="does not match"):
        make_mesh(ParallelConfig(data=3, model=5), 8)
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    with pytest.raises(UserError, match="row_multiple"):
        make_mesh(ParallelConfig(), 8)


def test_batches_keep_their_rows() -> None:
    mesh = make_mesh(ParallelConfig(), 8)
    rows = np.arange(16).reshape(8, 2)
    np.testing.assert_array_equal(to_devices(mesh, (rows,))[0], rows)
