"""Compares every method, forward and backward, with NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model import streams
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from tests.reference import streams as reference_streams
from tests.reference import transformer as reference
from tests.reference.algebra import every_method
from tests.reference.streams import STREAMS

SOURCE = np.array([[5, 6, 7, 1, 0, 0], [9, 8, 7, 6, 5, 1]])
TARGET = np.array([[1, 4, 5, 6, 3], [1, 7, 8, 9, 3]])
ALPHA = 0.3
# A quarter of the encoder contains at least one layer, and the two stacks differ in depth.
SIZES: dict[str, Any] = dict(encoder_layers=4, decoder_layers=2, width=8, ffn_width=12, heads=2, dropout=0.0)


def random_params(model: Transformer, dtype: str) -> Any:
    """Returns random parameters: matrices are around 0, all others are away from both 0 and 1."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        matrix = path[-1].key == "kernel" or path[0].key == "embedding"
        return (rng.normal(0, 0.3, leaf.shape) if matrix else rng.normal(0.7, 0.2, leaf.shape)).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_params())


def outputs(model: Transformer, params: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of encoder and decoder without compilation. Another test compares scan and loop."""
    with jax.disable_jit():
        memory = model.encode(params, jnp.asarray(SOURCE), jnp.asarray(ALPHA))
        return memory, model.decode(params, memory, jnp.asarray(SOURCE), jnp.asarray(TARGET), jnp.asarray(ALPHA))


def expected(method: str, params: Any, kind: str = "layer_norm") -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs of encoder and decoder of the reference."""
    positions = np.arange(6)[:, None] / 10000 ** (2 * np.arange(4) / 8)
    positions = np.concatenate([np.sin(positions), np.cos(positions)], -1).astype(np.float32)  # as in the model
    table = params["embedding"]["shared"]
    source_x, target_x = (table[ids] * np.sqrt(8) + positions[: ids.shape[1]] for ids in (SOURCE, TARGET))
    return reference.forward(method, params, source_x, target_x, SOURCE != 0, heads=2, alpha=ALPHA, kind=kind)


TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


def errors(method: str, dtype: str, kind: str = "layer_norm", **options: Any) -> dict[str, float]:
    """Returns the largest errors of both outputs and of the gradient, compared with the reference.

    Errors of the outputs are relative to the largest value, errors of the gradient to its norm. The gradient is
    compared along one random direction per leaf, where the reference takes a complex step.
    """
    real = SOURCE != 0
    rng = np.random.default_rng(1)
    weight_memory = rng.normal(size=(2, 6, 8)) * real[..., None]
    weight_out = rng.normal(size=(2, 5, 8))
    with jax.enable_x64(dtype == "float64"):
        options = SIZES | options
        model = Transformer(ModelConfig(method=method, norm=kind, dtype=dtype, carry_dtype=dtype, **options), 12, 12)
        params = random_params(model, dtype)

        def scalar(params: Any) -> tuple[jax.Array, Any]:
            memory, out = outputs(model, params)
            return (memory * weight_memory).sum() + (out * weight_out).sum(), (memory, out)

        (_, ours_out), gradient = jax.value_and_grad(scalar, has_aux=True)(params)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    memory, out = expected(method, exact, kind)
    scale = max(1.0, np.abs(memory[real]).max(), np.abs(out).max())

    leaves, tree = jax.tree.flatten(exact)
    gradient_norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(gradient)))
    slopes = []
    for index, ours in enumerate(jax.tree.leaves(gradient)):
        direction = rng.normal(size=ours.shape)
        stepped = [leaf + 1e-30j * direction if at == index else leaf for at, leaf in enumerate(leaves)]
        moved_memory, moved_out = expected(method, jax.tree.unflatten(tree, stepped), kind)
        theirs = ((moved_memory * weight_memory).sum() + (moved_out * weight_out).sum()).imag / 1e-30
        slopes.append(abs((np.asarray(ours, np.float64) * direction).sum() - theirs) / gradient_norm)
    return {
        "memory": np.abs(np.asarray(ours_out[0]) - memory)[real].max() / scale,
        "output": np.abs(np.asarray(ours_out[1]) - out).max() / scale,
        "gradient": max(slopes),
    }


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", every_method())
def test_forward_and_gradient_of_every_method(method: str, dtype: str) -> None:
    measured = errors(method, dtype)
    assert {name: error for name, error in measured.items() if not error <= TOLERANCE[dtype]} == {}


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["rms_norm", "scale_norm", "scale_norm_fixed", "dyt", "derf", "none"])
def test_forward_and_gradient_with_other_norms(kind: str, dtype: str) -> None:
    measured = errors("sub_ln", dtype, kind)
    assert {name: error for name, error in measured.items() if not error <= TOLERANCE[dtype]} == {}


@pytest.mark.slow
def test_blocks_of_several_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five layers of the encoder form blocks of three and two layers."""
    monkeypatch.setattr(streams, "BLOCKS", 2)
    monkeypatch.setattr(reference_streams, "BLOCKS", 2)
    assert max(errors("block_attnres", "float64", encoder_layers=5).values()) <= TOLERANCE["float64"]


def test_forward_and_gradient_with_value_residual() -> None:
    assert max(errors("pre_ln", "float64", value_residual=True).values()) <= TOLERANCE["float64"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["post_ln", "pre_ln", "branchnorm"])
def test_forward_and_gradient_in_float32(method: str) -> None:
    assert max(errors(method, "float32").values()) <= TOLERANCE["float32"]


def test_every_method_has_a_reference() -> None:
    assert {*reference.SUBLAYER, *STREAMS} == set(METHODS)
