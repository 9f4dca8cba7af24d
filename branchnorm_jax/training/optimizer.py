"""Optimisers as optax transformations of gradients into directions; `step.py` multiplies by the learning rate."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.config import TrainConfig
from branchnorm_jax.errors import UserError


class FairseqAdamState(NamedTuple):
    """State of `scale_by_fairseq_adam`: completed updates, int32 [], and both moments, shaped like the parameters."""

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's own states
    mu: optax.Updates
    nu: optax.Updates


def scale_by_fairseq_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with epsilon added to the raw root: sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).

    optax and PyTorch add it after the bias correction, which makes fairseq's epsilon 1 / sqrt(1 - b2^t) times larger:
    7 times at the first update for b2 = 0.98.
    """

    def init(params: optax.Params) -> FairseqAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return FairseqAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        grads: optax.Updates, state: FairseqAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, FairseqAdamState]:
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        t = count.astype(jnp.float32)
        correction = jnp.sqrt(1 - b2**t) / (1 - b1**t)
        updates = jax.tree.map(lambda m, v: correction * m / (jnp.sqrt(v) + eps), mu, nu)
        return updates, FairseqAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _adam(train: TrainConfig) -> optax.GradientTransformation:
    if train.adam_eps_mode == "fairseq":
        return scale_by_fairseq_adam(train.adam_b1, train.adam_b2, train.adam_eps)
    return optax.scale_by_adam(train.adam_b1, train.adam_b2, train.adam_eps)


def _adamw(train: TrainConfig) -> optax.GradientTransformation:
    """Adam with decoupled decay of all parameters, biases and norms included, as fairseq does."""
    return optax.chain(_adam(train), optax.add_decayed_weights(train.weight_decay))


OPTIMIZERS: dict[str, Callable[[TrainConfig], optax.GradientTransformation]] = {"adamw": _adamw, "adam": _adam}


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then the optimiser that the config names. Raises `UserError` with the known names."""
    if train.optimizer not in OPTIMIZERS:
        raise UserError(f"config: train.optimizer={train.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    clip = optax.clip_by_global_norm(train.clip_norm) if train.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[train.optimizer](train))
