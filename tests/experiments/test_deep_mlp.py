"""Fully connected networks: numbers of each method, the ways to run the layers, and signal propagation at the start."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.training.lower import allocated_bytes
from experiments.cifar import Images, Split
from experiments.deep_mlp import (
    METHODS,
    OPTIMIZERS,
    QUANTILES,
    Run,
    init,
    layer,
    logits,
    loss,
    singular_values,
    train,
    transform,
)

DEPTH, WIDTH, SIDE = 5, 8, 2


def example(method: str, depth: int = DEPTH) -> tuple[dict[str, Any], Split]:
    """Returns float64 parameters with nothing at 0 or 1, and a batch. Needs `jax.enable_x64`."""
    shapes = jax.eval_shape(functools.partial(init, METHODS[method], depth, WIDTH, SIDE * SIDE * 3), jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.2 + 0.5 * rng.normal(size=leaf.shape)), shapes)
    return params, Split(rng.normal(size=(6, SIDE, SIDE, 3)), np.array([0, 1, 2, 3, 9, 0], np.int32))


def in_torch(method: str, params: Any, images: np.ndarray) -> torch.Tensor:
    """Computes the logits layer by layer, from the equations of the paper's Table 1."""
    x = torch.tensor(images).reshape(len(images), -1) @ params["embed"]
    layers = params["layers"]
    for index in range(len(layers["kernel"])):

        def norm(x: torch.Tensor, index: int = index) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], layers["scale"][index], layers["bias"][index])

        def branch(x: torch.Tensor, index: int = index) -> torch.Tensor:
            return torch.relu(x @ layers["kernel"][index])

        if method == "vanilla":
            x = branch(x)
        elif method == "residual":
            x = x + branch(x)
        elif method == "norm":
            x = norm(branch(x))
        elif method == "pre_norm":
            x = x + branch(norm(x))
        elif method == "post_norm":
            x = norm(x + branch(x))
        elif method == "rezero":
            x = x + layers["weight"][index] * branch(x)
        else:
            raise AssertionError(f"no reference for {method}")
    return x @ params["output"]


@pytest.mark.parametrize("method", METHODS)
def test_logits_loss_and_gradient_equal_pytorch(method: str) -> None:
    with jax.enable_x64(True):
        params, batch = example(method)
        scores = jax.jit(functools.partial(logits, METHODS[method]))(params, batch.images)
        update = functools.partial(jax.grad(loss, argnums=1, has_aux=True), METHODS[method], remat="nested")
        gradient, figure = jax.jit(update)(params, batch)
    theirs = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), requires_grad=True), params)
    expected = in_torch(method, theirs, batch.images)
    mean = torch.nn.functional.cross_entropy(expected, torch.tensor(batch.labels, dtype=torch.long))
    mean.backward()
    np.testing.assert_allclose(scores, expected.detach(), rtol=1e-10)
    accuracy = (expected.argmax(-1).numpy() == batch.labels).mean()
    np.testing.assert_allclose(figure[0], mean.item(), rtol=1e-10)
    np.testing.assert_allclose(figure[1], accuracy, rtol=1e-7)  # JAX computes means of truth values in float32
    for ours, leaf in zip(jax.tree.leaves(gradient), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(ours, leaf.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("remat", REMAT)
def test_every_way_to_run_the_layers_equals_a_loop(remat: str) -> None:
    method = "rezero"
    with jax.enable_x64(True):
        params, _ = example(method, depth=7)
        start = jnp.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)

        def looped(layers: Any) -> jax.Array:
            x = start
            for index in range(7):
                x, _ = layer(METHODS[method], x, jax.tree.map(lambda leaf, index=index: leaf[index], layers))
            return jnp.sin(x).sum()

        def stacked(layers: Any) -> jax.Array:
            return jnp.sin(transform(METHODS[method], layers, start, remat)).sum()

        expected, ours = (jax.jit(jax.value_and_grad(way))(params["layers"]) for way in (looped, stacked))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13)


def test_rezero_is_the_identity_at_the_start() -> None:
    params = init(METHODS["rezero"], 50, WIDTH, 12, jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (4, WIDTH))
    np.testing.assert_array_equal(transform(METHODS["rezero"], params["layers"], x), x)
    values = jax.jit(functools.partial(singular_values, METHODS["rezero"]))(params, jnp.ones((2, 2, 3)))
    np.testing.assert_allclose(values, np.ones(WIDTH), rtol=1e-6)


def test_singular_values_are_those_of_the_product_of_all_layers() -> None:
    """The Jacobian of a ReLU network is a product of masked matrices."""
    with jax.enable_x64(True):
        params, batch = example("residual")
        values = singular_values(METHODS["residual"], params, jnp.asarray(batch.images[0]))
    x, product = batch.images[0].ravel() @ np.asarray(params["embed"]), np.eye(WIDTH)
    for kernel in np.asarray(params["layers"]["kernel"]):
        product = (np.eye(WIDTH) + kernel.T * (x @ kernel > 0)[:, None]) @ product
        x = x + np.maximum(x @ kernel, 0)
    np.testing.assert_allclose(values, np.linalg.svd(product, compute_uv=False), rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_initial_variance_keeps_the_signal_as_the_papers_predict(method: str) -> None:
    """Mean squares after a layer: v / 2 of the input's through a ReLU layer (He et al., 2015), 1 after LayerNorm.

    With a skip connection, x and the branch are uncorrelated on average.
    """
    width = 512
    rule = METHODS[method]
    params = init(rule, 1, width, 4, jax.random.key(3))
    x = 3 * jax.random.normal(jax.random.key(4), (400, width))
    squares = float(jnp.square(transform(rule, params["layers"], x)).mean())
    expected = {"vanilla": 9.0, "residual": 9 * (1 + 0.125), "pre_norm": 9 + 1, "rezero": 9.0}.get(method, 1.0)
    assert squares == pytest.approx(expected, rel=0.05)


def test_first_layers_do_not_depend_on_depth() -> None:
    shallow, deep = (init(METHODS["rezero"], depth, WIDTH, 12, jax.random.key(0)) for depth in (3, 9))
    np.testing.assert_array_equal(shallow["layers"]["kernel"], deep["layers"]["kernel"][:3])
    np.testing.assert_array_equal(shallow["output"], deep["output"])


def test_adagrad_equals_pytorch() -> None:
    """Three updates, the first with a gradient of 0, as ReZero's matrices get."""
    gradients = np.array([[0.0, 2.0, -1.0], [1.0, 0.0, 0.5], [-3.0, 1.0, 0.25]], np.float32)
    optimizer = OPTIMIZERS["adagrad"](0.1)
    ours = jnp.ones(3)
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    theirs = torch.nn.Parameter(torch.ones(3))
    reference = torch.optim.Adagrad([theirs], lr=0.1)
    for gradient in gradients:
        change, state = update(jnp.asarray(gradient), state, ours)
        ours = optax.apply_updates(ours, change)
        theirs.grad = torch.tensor(gradient)
        reference.step()
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-6)


def test_training_fits_images_and_reports_every_epoch() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40, dtype=np.int32) % 10
    split = Split(rng.normal(size=(40, 32, 32, 3)).astype(np.float32), labels)
    run = Run(method="rezero", depth=20, width=16, learning_rate=0.05, batch=10, epochs=6)
    result = train(run, Images(split, split))
    assert result["status"] == "done"
    assert len(result["train_loss"]) == len(result["train_accuracy"]) == 6
    assert result["train_loss"][-1] < 0.2 < 2 < result["train_loss"][0]
    assert result["test_accuracy"] == 1.0
    assert result["train_accuracy"][result["epochs_to_target"] - 1] >= 0.8
    assert np.shape(result["singular_values"]) == (7, len(QUANTILES))
    np.testing.assert_allclose(result["singular_values"][0], 1.0, atol=1e-5)
    params = 3 * 32 * 32 * 16 + 20 * (16 * 16 + 1) + 16 * 10
    assert result["peak_bytes"] > 2 * 4 * params  # parameters and Adagrad's sums


def test_divergence_ends_a_run() -> None:
    split = Split(np.full((10, 32, 32, 3), 1e30, np.float32), np.arange(10, dtype=np.int32))
    result = train(Run(method="residual", depth=400, width=8, batch=5, epochs=3), Images(split, split))
    assert result["status"] == "diverged"
    assert result["train_loss"] == [None]
    assert result["epochs_to_target"] is None


def test_nested_remat_needs_less_memory_in_a_deep_network() -> None:
    method, depth = METHODS["rezero"], 400
    params = jax.eval_shape(functools.partial(init, method, depth, 8, 12), jax.random.key(0))
    batch = Split(np.zeros((512, 2, 2, 3), np.float32), np.zeros(512, np.int32))
    sizes = {}
    for remat in ("none", "full", "nested"):
        update = jax.jit(functools.partial(jax.grad(loss, argnums=1, has_aux=True), method, remat=remat))
        sizes[remat] = allocated_bytes(update.lower(params, batch).compile())
    carry = 4 * 8 * 512
    assert sizes["nested"] < 100 * carry < depth * carry <= sizes["full"] < sizes["none"]
