"""Optimisers: optax transformations from gradients to directions.

`update.py` multiplies the directions by the learning rate.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from branchnorm_jax.errors import UserError
from branchnorm_jax.model.depth_rules import relative_depth
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.recipe import STACKS, Depth
from branchnorm_jax.options import ModelConfig, TrainConfig
from branchnorm_jax.training.schedules import frozen_parts


class FairseqAdamState(NamedTuple):
    """State of `scale_by_fairseq_adam`.

    Attributes:
      count: number of completed updates, int32 [].
      mu: first moments, with the shapes of the parameters.
      nu: second moments, with the shapes of the parameters.
    """

    count: jax.Array  # type: ignore[assignment]  # It overrides tuple.count, as in the states of optax.
    mu: optax.Updates
    nu: optax.Updates


def scale_by_fairseq_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Returns Adam with epsilon added to the square root before the bias correction, as in fairseq.

        direction = sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)

    optax and PyTorch add epsilon after the bias correction. In comparison, fairseq's epsilon is 1 / sqrt(1 - b2^t)
    times larger. This factor is 7 at the first update for b2 = 0.98.
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


def scale_by_layer_trust_ratio() -> optax.GradientTransformation:
    """Scales updates by LAMB's trust ratio |p| / |u| of each parameter array and layer (You et al., 2020).

    The ratio is 1 if either norm is 0. optax computes one ratio per array, but axis 0 of a stack's arrays, and of the
    norms of its combination (DLCL), is the layer axis. Therefore this function computes one ratio per layer.
    """

    def update(updates: Any, params: Any = None) -> Any:
        def scale(part: Any, of: Any) -> Any:
            return optax.scale_by_trust_ratio().update(part, optax.EmptyState(), of)[0]

        def scale_leaf(path: Any, part: Any, of: Any) -> Any:
            names = [key.key for key in path[:2]]
            by_layer = names[0] in STACKS or (names[0].endswith("_combination") and names[1] == "norm")
            return (jax.vmap(scale) if by_layer else scale)(part, of)

        return jax.tree.map_with_path(scale_leaf, updates, params)

    return optax.stateless(update)


Factors = Mapping[str, float]
"""Part of the parameters -> a factor; 1 for parts that are not in it."""


def scale_parts(factors: Factors) -> optax.GradientTransformation:
    """Multiplies the updates of each part of the parameters by a factor."""
    return optax.stateless(
        lambda updates, params=None: {
            name: optax.tree.scale(factors.get(name, 1.0), part) for name, part in updates.items()
        }
    )


def _adam(train: TrainConfig, factors: Factors) -> optax.GradientTransformation:
    """Returns Adam with an epsilon of adam_eps / factor in each part of the parameters.

    Adam's direction does not depend on the scale of the gradient, except for epsilon: a gradient times f has the
    direction of the gradient with epsilon / f.
    """
    scale = scale_by_fairseq_adam if train.adam_eps_mode == "fairseq" else optax.scale_by_adam
    adam = scale(train.adam_b1, train.adam_b2, train.adam_eps)
    return optax.chain(scale_parts(factors), adam) if factors else adam


def _decay(train: TrainConfig) -> optax.GradientTransformation:
    """Returns weight decay for all parameters, including biases and norms, as in fairseq."""
    return optax.add_decayed_weights(train.weight_decay)


def _radam(train: TrainConfig) -> optax.GradientTransformation:
    return optax.scale_by_radam(train.adam_b1, train.adam_b2, train.adam_eps)


def _muon(train: TrainConfig) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al., 2024) for the matrices of layers, and Adam for all other parameters.

    Muon's direction is 0.2 sqrt(max(d_in, d_out)) O(m) for a matrix with the Nesterov momentum m. O replaces its
    singular values by numbers near 1. The factor gives the entries the size that they have with Adam, so both have one
    learning rate (*Muon is Scalable for LLM Training*, Liu et al., 2025). Each layer's matrix is orthogonalised by
    itself.
    """

    def each_layer(updates: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2), updates)

    def resize(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda o: 0.2 * max(o.shape[1:]) ** 0.5 * o, updates)

    orthogonal = optax.contrib.scale_by_muon(weight_dimension_numbers=each_layer)
    return optax.chain(
        optax.masked(optax.chain(orthogonal, optax.stateless(resize)), is_layer_matrix),
        optax.masked(_adam(train, {}), lambda tree: jax.tree.map(lambda matrix: not matrix, is_layer_matrix(tree))),
    )


def is_layer_matrix(tree: Any) -> Any:
    """Returns the tree with True at the matrices of layers: the kernels [L, d_in, d_out] of linear maps."""
    return jax.tree.map_with_path(lambda path, _: path[0].key in STACKS and path[-1].key == "kernel", tree)


def moments_of(opt_state: Any) -> list[Any]:
    """Returns the trees in an optimiser state that have the structure of the parameters. Such trees are dicts."""
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_dict) if _is_dict(node)]


def with_moments(opt_state: Any, moments: Iterable[Any]) -> Any:
    """Returns the optimiser state with the trees of `moments_of` replaced by `moments`."""
    given = iter(moments)
    return jax.tree.map(lambda node: next(given) if _is_dict(node) else node, opt_state, is_leaf=_is_dict)


def _is_dict(node: Any) -> bool:
    return isinstance(node, dict)


OPTIMIZERS: dict[str, Callable[[TrainConfig, Factors], optax.GradientTransformation]] = {
    # Decoupled weight decay, which bypasses the moments: AdamW. fairseq calls it adam.
    "adamw": lambda train, factors: optax.chain(_adam(train, factors), _decay(train)),
    # Weight decay as part of the gradient: L2 regularisation.
    "adam": lambda train, factors: optax.chain(_decay(train), _adam(train, factors)),
    "radam": lambda train, factors: optax.chain(_radam(train), _decay(train)),
    "lamb": lambda train, factors: optax.chain(_adam(train, factors), _decay(train), scale_by_layer_trust_ratio()),
    "muon": lambda train, factors: optax.chain(_muon(train), _decay(train)),
    # PyTorch's SGD with momentum: m = b1 m + g; p <- p - rate m. Weight decay is part of the gradient.
    "sgd": lambda train, factors: optax.chain(_decay(train), optax.trace(decay=train.adam_b1)),
    # optax adds epsilon to the sum of squares. PyTorch adds 1e-10 to the square root.
    "adagrad": lambda train, factors: optax.chain(
        _decay(train), optax.scale_by_rss(initial_accumulator_value=0.0, eps=1e-20)
    ),
}
"""Optimisers by name.

All use weight_decay. Adam's family uses adam_b1, adam_b2 and adam_eps, and so does Muon, except for the matrices of the
layers. All of these but radam use adam_eps_mode. sgd uses adam_b1 as its momentum, and adagrad none of these options.
"""

ADAMS = ("adamw", "adam", "lamb")
"""Optimisers whose epsilon `_adam` multiplies by a factor for each layer."""


def make_optimizer(train: TrainConfig, model: ModelConfig | None = None) -> optax.GradientTransformation:
    """Returns gradient clipping followed by the optimiser that the config names.

    Args:
      train: the options of the optimiser.
      model: the model, whose method may have its own epsilon of Adam (`Recipe.depth_power`); None for any other method.

    Raises:
      UserError: if the optimiser is unknown (the message lists the known names), or does not fit the method.
    """
    if train.optimizer not in OPTIMIZERS:
        raise UserError(f"config: train.optimizer={train.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    factors = adam_factors(model)
    if factors and train.optimizer not in ADAMS:
        raise UserError(
            f"config: model.method={model.method if model else ''} scales Adam's epsilon, so it needs train.optimizer="
            f"{', '.join(ADAMS)}, not {train.optimizer}"
        )
    clip = clip_trained(train.clip_norm, frozen_parts(train)) if train.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[train.optimizer](train, factors))


def clip_trained(limit: float, frozen: Collection[str]) -> optax.GradientTransformation:
    """Clips the gradient of all parts of the parameters but the `frozen` ones to a norm of at most `limit`."""
    clip = optax.clip_by_global_norm(limit)

    def update(grads: Any, params: Any = None) -> Any:
        trained = {name: part for name, part in grads.items() if name not in frozen}
        return grads | clip.update(trained, optax.EmptyState())[0]

    return optax.stateless(update)


def adam_factors(model: ModelConfig | None) -> Factors:
    """Returns the factors of `_adam` for a model: m^p in the stacks of a recipe with a `depth_power` p."""
    power = get_recipe(model.method).depth_power if model else 0.0
    if model is None or not power:
        return {}
    return relative_depth(model.base_layers, power)(Depth(model.encoder_layers, model.decoder_layers))._asdict()
