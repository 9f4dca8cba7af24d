"""ResNets: number of parameters, and numbers of each method against PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional

from experiments.resnet import METHODS, Method, ResNet, Run, make_optimizer, network


def count(method: Method, blocks: int, width: int) -> int:
    """The closed form: convolutions, the linear layer, and what the method adds."""
    w, n = width, blocks
    convolutions = 9 * (3 * w + 2 * n * w**2 + (2 + (2 * n - 1) * 4) * w**2 + (8 + (2 * n - 1) * 16) * w**2)
    linear = 4 * w * 10 + 10
    norms = 2 * (w + 2 * n * (w + 2 * w + 4 * w)) if method.norm else 0
    scalars = 3 * n if method.weighted else 15 * n + 2 if method.fixup else 0
    return convolutions + linear + norms + scalars


@pytest.mark.parametrize("depth", [20, 56])
@pytest.mark.parametrize("method", METHODS)
def test_number_of_parameters(method: str, depth: int) -> None:
    model = network(Run(method=method, depth=depth))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), training=False))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    assert parameters == count(METHODS[method], (depth - 2) // 6, 16)
    # He et al. (2016), Table 6: 0.27 and 0.85 million.
    assert round(parameters / 1e6, 2) == {20: 0.27, 56: 0.85}[depth]


def example(method: str, blocks: int = 1) -> tuple[ResNet, Any, np.ndarray, np.ndarray]:
    """Returns a network, float64 variables with nothing at 0 or 1, images and classes. Needs `jax.enable_x64`."""
    rng = np.random.default_rng(0)
    model = ResNet(METHODS[method], blocks, 4)
    images = rng.normal(size=(5, 8, 8, 3))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images, training=False))
    variables = jax.tree.map(lambda leaf: jnp.asarray(0.1 + 0.4 * rng.random(leaf.shape)), shapes)
    return model, variables, images, np.array([0, 4, 9, 1, 1])


class InTorch:
    """The forward pass from the equations, with the parameters under their Flax names."""

    def __init__(self, method: str, variables: Any, training: bool) -> None:
        def leaf(value: Any) -> torch.Tensor:
            return torch.tensor(np.asarray(value), requires_grad=True)

        self.method, self.training = method, training
        self.params = jax.tree.map(leaf, variables["params"])
        self.running = jax.tree.map(lambda value: torch.tensor(np.asarray(value)), variables.get("batch_stats", {}))

    def norm(self, x: torch.Tensor, params: Any, running: Any, index: int) -> torch.Tensor:
        """BatchNorm with the statistics of the batch, or the running ones."""
        own, stats = params[f"BatchNorm_{index}"], running[f"BatchNorm_{index}"]
        moments = None if self.training else stats["mean"], None if self.training else stats["var"]
        return functional.batch_norm(x, *moments, own["scale"], own["bias"], self.training, eps=1e-5)

    def convolve(self, x: torch.Tensor, params: Any, index: int, stride: int = 1) -> torch.Tensor:
        kernel = params[f"Conv_{index}"]["kernel"].permute(3, 2, 0, 1)
        return functional.conv2d(x, kernel, stride=stride, padding=1)

    def block(self, x: torch.Tensor, params: Any, running: Any, stride: int) -> torch.Tensor:
        scalar = [params[f"Scalar_{i}"]["value"] for i in range(5) if f"Scalar_{i}" in params]
        if self.method == "fixup":
            b1, b2, b3, multiplier, b4 = scalar
            hidden = torch.relu(self.convolve(x + b1, params, 0, stride) + b2)
            branch = multiplier * self.convolve(hidden + b3, params, 1) + b4
        elif self.method == "rezero":
            branch = scalar[0] * self.convolve(torch.relu(self.convolve(x, params, 0, stride)), params, 1)
        else:
            hidden = torch.relu(self.norm(self.convolve(x, params, 0, stride), params, running, 0))
            branch = self.norm(self.convolve(hidden, params, 1), params, running, 1)
            if self.method == "rezero_batch_norm":
                branch = scalar[0] * branch
        new = (branch.shape[1] - x.shape[1]) // 2
        skip = functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, new, new))
        return torch.relu(skip + branch)

    def logits(self, images: np.ndarray, blocks: int) -> torch.Tensor:
        params, running = self.params, self.running
        x = self.convolve(torch.tensor(images).permute(0, 3, 1, 2), params, 0)
        if "batch_norm" in self.method:
            x = self.norm(x, params, running, 0)
        elif self.method == "fixup":
            x = x + params["Scalar_0"]["value"]
        x = torch.relu(x)
        for index in range(3 * blocks):
            stride = 2 if index in (blocks, 2 * blocks) else 1
            x = self.block(x, params[f"Block_{index}"], running.get(f"Block_{index}"), stride)
        x = x.mean((2, 3))
        if self.method == "fixup":
            x = x + params["Scalar_1"]["value"]
        return x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]


@pytest.mark.parametrize("method", METHODS)
def test_logits_equal_pytorch(method: str) -> None:
    with jax.enable_x64(True):
        model, variables, images, _ = example(method)
        ours = jax.jit(lambda: model.apply(variables, images, training=False))()
    np.testing.assert_allclose(ours, InTorch(method, variables, False).logits(images, 1).detach(), rtol=1e-9)


@pytest.mark.parametrize("method", ["fixup", "rezero_batch_norm"])
def test_training_gradient_equals_pytorch(method: str) -> None:
    with jax.enable_x64(True):
        model, variables, images, labels = example(method)

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            scores, _ = model.apply({**variables, "params": params}, images, training=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), scores

        gradient, scores = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    theirs = InTorch(method, variables, True)
    expected = theirs.logits(images, 1)
    functional.cross_entropy(expected, torch.tensor(labels)).backward()
    np.testing.assert_allclose(scores, expected.detach(), rtol=1e-9)
    for ours, leaf in zip(jax.tree.leaves(gradient), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(ours, leaf.grad, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize(("method", "width"), [("fixup", 4), ("rezero", 4), ("rezero", 3)])
def test_blocks_are_shortcuts_at_the_start(method: str, width: int) -> None:
    """Then a network of any depth computes relu, subsampling and mean of the first convolution."""
    images = jax.random.normal(jax.random.key(0), (3, 8, 8, 3))
    model = ResNet(METHODS[method], 1, width)
    variables = jax.jit(lambda: model.init(jax.random.key(1), images, training=False))()
    params = variables["params"]
    x = jax.lax.conv_general_dilated(
        images, params["Conv_0"]["kernel"], (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pooled = np.maximum(x, 0)[:, ::4, ::4].mean((1, 2))
    before = width // 2 + width  # of the w and 2 w new channels, the smaller half
    features = np.pad(pooled, ((0, 0), (before, 3 * width - before)))
    expected = features @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    ours: Any = jax.jit(lambda: model.apply(variables, images, training=False))()
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    if method == "fixup":
        np.testing.assert_array_equal(expected, np.zeros((3, 10)))


def test_optimizer_equals_pytorch() -> None:
    """SGD with momentum, weight decay of kernels only, a tenth of the rate for scalars, and steps of the schedule."""
    run = Run(learning_rate=0.1, weight_decay=0.5)
    params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.ones(2), "scalar": jnp.array(1.0)}
    optimizer = make_optimizer(run, updates=8)
    state = optimizer.init(params)
    theirs = {name: torch.nn.Parameter(torch.tensor(np.asarray(value))) for name, value in params.items()}
    groups: list[dict[str, Any]] = [
        {"params": [theirs["kernel"]], "weight_decay": 0.5},
        {"params": [theirs["bias"]]},
        {"params": [theirs["scalar"]], "lr": 0.01},
    ]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(reference, [4, 6])
    rng = np.random.default_rng(0)
    for _ in range(8):
        gradient = {name: rng.normal(size=value.shape).astype(np.float32) for name, value in params.items()}
        change, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, params)
        params = optax.apply_updates(params, change)
        for name, leaf in theirs.items():
            leaf.grad = torch.tensor(gradient[name])
        reference.step()
        schedule.step()
        for name, leaf in theirs.items():
            np.testing.assert_allclose(params[name], leaf.detach(), rtol=1e-5, atol=1e-6)
