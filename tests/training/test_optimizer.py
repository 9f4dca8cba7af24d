"""Compares every optimiser with PyTorch or with its formula."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ModelConfig, TrainConfig
from branchnorm_jax.training.optimizer import make_optimizer, moments_of


def run(train: TrainConfig, gradients: np.ndarray, start: np.ndarray, rate: float) -> np.ndarray:
    """Returns the parameters after each gradient, applied as in `step.py`."""
    optimizer = make_optimizer(train)
    params = {"w": jnp.asarray(start, jnp.float32)}
    state = optimizer.init(params)
    history = []
    for gradient in gradients:
        directions, state = optimizer.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, directions)
        history.append(np.asarray(params["w"]))
    return np.stack(history)


RANDOM = np.random.default_rng(0)
GRADIENTS = RANDOM.normal(size=(20, 7)).astype(np.float32)
START = RANDOM.normal(size=7).astype(np.float32)


def test_adamw_equals_pytorch() -> None:
    weight = torch.nn.Parameter(torch.tensor(START))
    adam = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    expected = []
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient)
        adam.step()
        expected.append(weight.detach().numpy().copy())
    result = run(TrainConfig(weight_decay=0.1), GRADIENTS, START, 1e-2)
    np.testing.assert_allclose(result, np.stack(expected), atol=2e-6)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adam", lambda w: torch.optim.Adam(w, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)),
        (
            "radam",
            lambda w: torch.optim.RAdam(
                w, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, decoupled_weight_decay=True
            ),
        ),
        ("sgd", lambda w: torch.optim.SGD(w, lr=1e-2, momentum=0.9, weight_decay=0.1)),
        ("adagrad", lambda w: torch.optim.Adagrad(w, lr=1e-2, weight_decay=0.1)),
    ],
)
def test_other_optimizers_equal_pytorch(name: str, theirs: Any) -> None:
    weight = torch.nn.Parameter(torch.tensor(START))
    optimizer, expected = theirs([weight]), []
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        expected.append(weight.detach().numpy().copy())
    result = run(TrainConfig(optimizer=name, weight_decay=0.1), GRADIENTS, START, 1e-2)
    np.testing.assert_allclose(result, np.stack(expected), atol=3e-6)


def test_lamb_uses_one_ratio_per_layer() -> None:
    """The ratio is |p| / |u| per layer and matrix, where u is AdamW's update; it is 1 for parameters of norm 0."""
    params = {
        "encoder": {"kernel": RANDOM.normal(size=(3, 4, 5)), "branch": np.zeros(3)},
        "encoder_combination": {"norm": {"scale": RANDOM.normal(size=(3, 4))}, "weight": RANDOM.normal(size=(4, 4))},
        "embedding": np.ones((2, 4)),
    }
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    params["encoder"]["kernel"] *= jnp.array([1.0, 10.0, 100.0])[:, None, None]
    grads = jax.tree.map(lambda leaf: jnp.asarray(RANDOM.normal(size=leaf.shape), jnp.float32), params)
    plain, lamb = (make_optimizer(TrainConfig(optimizer=name, weight_decay=0.1)) for name in ("adamw", "lamb"))
    (u, _), (scaled, _) = (optimizer.update(grads, optimizer.init(params), params) for optimizer in (plain, lamb))
    for layer in range(3):
        matrix, update = params["encoder"]["kernel"][layer], u["encoder"]["kernel"][layer]
        ratio = np.linalg.norm(matrix) / np.linalg.norm(update)
        np.testing.assert_allclose(scaled["encoder"]["kernel"][layer], ratio * update, rtol=1e-5)
    np.testing.assert_allclose(scaled["encoder"]["branch"], u["encoder"]["branch"], rtol=1e-6)
    ratio = np.linalg.norm(params["embedding"]) / np.linalg.norm(u["embedding"])
    np.testing.assert_allclose(scaled["embedding"], ratio * u["embedding"], rtol=1e-5)
    combination, update = params["encoder_combination"], u["encoder_combination"]
    ratio = np.linalg.norm(combination["norm"]["scale"], axis=1) / np.linalg.norm(update["norm"]["scale"], axis=1)
    np.testing.assert_allclose(
        scaled["encoder_combination"]["norm"]["scale"], ratio[:, None] * update["norm"]["scale"], rtol=1e-5
    )
    ratio = np.linalg.norm(combination["weight"]) / np.linalg.norm(update["weight"])
    np.testing.assert_allclose(scaled["encoder_combination"]["weight"], ratio * update["weight"], rtol=1e-5)


def orthogonalised(m: np.ndarray) -> np.ndarray:
    """Returns Muon's five Newton-Schulz iterations on a matrix."""
    x = m / np.linalg.norm(m)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_orthogonalises_the_matrix_of_each_layer() -> None:
    """In float64 NumPy, for matrices of both shapes; all other parameters are Adam's."""
    shapes = {"fc1": {"kernel": (3, 4, 6), "bias": (3, 6)}, "fc2": {"kernel": (3, 6, 4)}, "branch": (3,)}
    draw = lambda shape: jnp.asarray(RANDOM.normal(size=shape), jnp.float32)  # noqa: E731
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(draw, {"encoder": shapes, "embedding": {"shared": (5, 4)}}, is_leaf=is_shape)
    train = TrainConfig(optimizer="muon", weight_decay=0.1)
    ours, adam = make_optimizer(train), make_optimizer(dataclasses.replace(train, optimizer="adamw"))
    state, adam_state = ours.init(params), adam.init(params)
    assert len(moments_of(state)) == 3 and sum(leaf.size for leaf in jax.tree.leaves(moments_of(state))) == 144 + 2 * 41
    momentum: dict[str, Any] = {"fc1": 0.0, "fc2": 0.0}
    for t in range(1, 4):
        grads = jax.tree.map(lambda leaf: draw(leaf.shape), params)
        directions, state = ours.update(grads, state, params)
        expected, adam_state = adam.update(grads, adam_state, params)
        for name in momentum:
            g = np.asarray(grads["encoder"][name]["kernel"], np.float64)
            momentum[name] = 0.95 * momentum[name] + 0.05 * g
            nesterov = 0.95 * momentum[name] / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
            flat = [orthogonalised(m) if m.shape[0] < m.shape[1] else orthogonalised(m.T).T for m in nesterov]
            expected["encoder"][name]["kernel"] = (
                0.2 * 6**0.5 * np.stack(flat) + 0.1 * params["encoder"][name]["kernel"]
            )
        for theirs, own in zip(jax.tree.leaves(expected), jax.tree.leaves(directions), strict=True):
            np.testing.assert_allclose(own, theirs, atol=2e-5)


def test_fairseq_adam_equals_its_formula() -> None:
    b1, b2, eps, decay, rate = 0.9, 0.98, 1e-3, 0.1, 1e-2
    p, m, v, expected = START.astype(np.float64), np.zeros(7), np.zeros(7), []
    for t, g in enumerate(GRADIENTS.astype(np.float64), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        size = rate * np.sqrt(1 - b2**t) / (1 - b1**t)
        p = p - rate * decay * p - size * m / (np.sqrt(v) + eps)
        expected.append(p)
    train = TrainConfig(adam_eps=eps, weight_decay=decay, adam_eps_mode="fairseq")
    np.testing.assert_allclose(run(train, GRADIENTS, START, rate), np.stack(expected), atol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "adam", "lamb"])
@pytest.mark.parametrize(("method", "power"), [("completep", 1.0), ("depth_mup", 0.5)])
def test_epsilon_of_layers_falls_with_depth(method: str, power: float, name: str) -> None:
    """The layers have epsilon / m^power, with m = layers / model.base_layers; all else has the given epsilon."""
    model = ModelConfig(method=method, encoder_layers=12, decoder_layers=6, base_layers=3)
    train = TrainConfig(optimizer=name, adam_eps=1e-2, weight_decay=0.0)
    params = {part: jnp.asarray(START) for part in ("embedding", "encoder", "decoder")}
    grads = jax.tree.map(lambda p: p / 50, params)

    def direction(train: TrainConfig, model: ModelConfig | None, part: str) -> np.ndarray:
        optimizer = make_optimizer(train, model)
        return np.asarray(optimizer.update(grads, optimizer.init(params), params)[0][part])

    for part, m in (("embedding", 1), ("encoder", 4), ("decoder", 2)):
        smaller = dataclasses.replace(train, adam_eps=1e-2 / m**power)
        np.testing.assert_allclose(direction(train, model, part), direction(smaller, None, part), rtol=1e-5)


@pytest.mark.parametrize(("mode", "first_step"), [("optax", 5.0e-4), ("fairseq", 1.24e-4)])
def test_epsilon_modes_differ_for_tiny_gradients(mode: str, first_step: float) -> None:
    train = TrainConfig(weight_decay=0.0, adam_eps_mode=mode)
    moved = run(train, np.full((1, 1), 1e-8), np.zeros(1), 1e-3)[0, 0]
    np.testing.assert_allclose(-moved, first_step, rtol=5e-3)


def test_clipping_uses_the_global_norm() -> None:
    optimizer = make_optimizer(TrainConfig(clip_norm=1.0, adam_b1=0.0, adam_b2=0.0, adam_eps=1.0, weight_decay=0.0))
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    directions, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    # With b1 = b2 = 0 and eps = 1, the direction of g is g / (|g| + 1), which reveals the clipped gradient.
    np.testing.assert_allclose(directions["a"][0], 0.6 / 1.6, rtol=1e-6)
    np.testing.assert_allclose(directions["b"][0], 0.8 / 1.8, rtol=1e-6)


def test_clipping_ignores_frozen_parts() -> None:
    """A resumed run may freeze other parts, so the state has the same structure."""
    values = {"encoder": 100.0, "encoder_norm": 50.0, "decoder": 3.0, "embedding": 4.0}
    gradient = {name: {"w": jnp.array([value])} for name, value in values.items()}
    clipped, structures = {}, []
    for freeze in ("", "encoder"):
        train = TrainConfig(optimizer="sgd", adam_b1=0.0, weight_decay=0.0, clip_norm=1.0, freeze=freeze)
        optimizer = make_optimizer(train)
        directions, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
        clipped[freeze] = {name: float(part["w"][0]) for name, part in directions.items()}
        structures.append([jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)])
    assert structures[0] == structures[1]
    norm = np.sqrt(100**2 + 50**2 + 3**2 + 4**2)
    assert clipped[""] == pytest.approx({name: value / norm for name, value in values.items()})
    assert clipped["encoder"] == pytest.approx(
        {"encoder": 100.0, "encoder_norm": 50.0, "decoder": 0.6, "embedding": 0.8}
    )


@pytest.mark.parametrize("name", ["radam", "sgd", "adagrad"])
def test_scaled_epsilon_needs_adam(name: str) -> None:
    with pytest.raises(UserError, match=f"completep.*adamw.*{name}"):
        make_optimizer(TrainConfig(optimizer=name), ModelConfig(method="completep"))


def test_unknown_optimizers_are_rejected() -> None:
    with pytest.raises(UserError, match="adamw"):
        make_optimizer(TrainConfig(optimizer="adamax"))
