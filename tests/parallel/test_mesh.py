"""Shardings of the parameters, and rejected meshes. tests/training/ tests training on 8 devices."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from branchnorm_jax.axes import MESH, RULES, partition
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.stack import REMAT
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


def operations(jaxpr: Any) -> Iterator[Any]:
    """Yields the operations of a program, also those of its loops."""
    for op in jaxpr.eqns:
        yield op
        for inner in jax.extend.core.jaxprs_in_params(op.params):
            yield from operations(inner)


@pytest.mark.parametrize("method", ["pre_ln", pytest.param("dlcl", marks=pytest.mark.slow), "mhc"])
def test_a_layer_recomputes_the_same_with_fsdp_and_gathers_its_matrices_again(method: str) -> None:
    """The forward loop stores no matrix, neither whole nor rounded; `remat` decides about everything else."""
    mesh = AbstractMesh((1, 2, 1), MESH, axis_types=(AxisType.Auto,) * 3)
    tokens = jnp.ones((2, 5), jnp.int32)

    def program(remat: str) -> list[Any]:
        shape: dict[str, Any] = {"encoder_layers": 3, "decoder_layers": 3, "width": 16, "ffn_width": 24, "heads": 2}
        model = Transformer(ModelConfig(method=method, remat=remat, dtype="bfloat16", **shape), 40, 40)

        def loss(params: Any) -> jax.Array:
            return model(params, tokens, tokens, jnp.ones(())).astype(jnp.float32).sum()

        return list(operations(jax.make_jaxpr(jax.grad(loss))(model.abstract_params()).jaxpr))

    for remat in REMAT:
        alone = program(remat)
        with jax.sharding.use_abstract_mesh(mesh):
            split = program(remat)
        products = [[op.primitive.name for op in ops].count("dot_general") for ops in (alone, split)]
        assert products[0] == products[1] > 0
        forward = [op for op in split if op.primitive.name == "scan" and not op.params["reverse"]]
        matrices = {(16, 16), (16, 24), (24, 16), (64, 24)}
        assert forward
        assert not matrices.intersection(leaf.aval.shape[1:] for op in forward for leaf in op.outvars)


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
