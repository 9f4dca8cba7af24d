"""Shardings of the parameters, and rejected meshes. tests/training/ tests training on 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from branchnorm_jax.axes import MESH, RULES, partition
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig, ParallelConfig
from branchnorm_jax.parallel.mesh import local_copy, local_mesh, make_mesh, replicated, shard_tree
from branchnorm_jax.parallel.rows import Rows


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
        assert set(names) <= set(RULES)


def test_matrices_are_split_over_the_model_axis_if_divisible() -> None:
    mesh = AbstractMesh((4, 1, 2), ("data", "fsdp", "model"))
    config = ModelConfig(width=6, heads=2, ffn_width=9, encoder_layers=2, decoder_layers=2)
    model = Transformer(config, 100, 100)
    params = model.abstract_params()
    specs = jax.tree.map(lambda split: split.spec, shard_tree(mesh, params, model.logical_axes()))  # type: ignore[arg-type]
    assert specs["embedding"]["shared"] == PartitionSpec("model", None)
    assert specs["encoder"]["self"]["q"]["kernel"] == PartitionSpec(None, None, "model")
    assert specs["encoder"]["self"]["o"]["kernel"] == PartitionSpec(None, "model", None)
    # 9 features cannot be halved.
    assert specs["encoder"]["ffn"]["fc1"]["kernel"] == PartitionSpec(None, None, None)


def test_matrices_are_split_over_fsdp_along_their_first_free_axis() -> None:
    sizes = {"data": 2, "fsdp": 4, "model": 2}
    # Over model by its rule; over fsdp along the other axis.
    assert partition((6, 64, 256), ("layers", "embed", "ffn"), sizes) == PartitionSpec(None, "fsdp", "model")
    assert partition((6, 256, 64), ("layers", "ffn", "embed"), sizes) == PartitionSpec(None, "model", "fsdp")
    # Without model, the first axis that fsdp divides.
    alone = sizes | {"model": 1}
    assert partition((6, 256, 64), ("layers", "ffn", "embed"), alone) == PartitionSpec(None, "fsdp", None)
    assert partition((30, 64), ("vocab", "embed"), alone) == PartitionSpec(None, "fsdp")
    # Layers are never split, and vectors stay whole.
    assert partition((8, 8), ("layers", "layers"), sizes) == PartitionSpec(None, None)
    assert partition((8, 64), ("layers", "embed"), sizes) == PartitionSpec(None, None)
    with pytest.raises(ValueError, match="twice"):
        partition((64, 64), ("heads", "ffn"), sizes)


def test_unsuitable_meshes_are_rejected() -> None:
    with pytest.raises(UserError, match="does not match"):
        make_mesh(ParallelConfig(data=3, model=5))


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_reach_the_devices_in_order_after_filling_up(parts: int) -> None:
    rows = Rows(make_mesh(ParallelConfig()), parts)
    batch = (1 + np.arange(14).reshape(7, 2),)
    whole = np.asarray(rows.put(rows.take(batch))[0])
    assert len(whole) == rows.total(7) == len(rows.indices(7))
    np.testing.assert_array_equal(whole[:7], batch[0])
    assert not whole[7:].any()


def test_local_copy_and_local_mesh_have_the_same_device() -> None:
    reordered = Mesh(np.array(jax.devices()[::-1]).reshape(-1, 1, 1), MESH)
    copy = local_copy(reordered, jax.device_put(jnp.ones(3), replicated(reordered)))
    assert copy.devices() == set(local_mesh(reordered).devices.flat)
