"""The growth of alpha: its value by layer and update, for all methods with a growing branch.

    alpha_l(u) = start_l + (end_l - start_l) shape(clip((u / T - begin_l) / (finish_l - begin_l), 0, 1))^power

Layers of a shallower model (`grown_from`, see `training/deepen.py`) have alpha = 1 at all times.

u is alpha's clock: the number of completed updates, unless training paused it. T is `alpha_steps`; l counts the layers
of a stack from 1. `alpha_schedule` chooses the shape, `alpha_order` a row of `ORDERS`, and `alpha_start` and
`alpha_end` set the limits.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.depth_rules import deepnorm_alpha
from branchnorm_jax.model.recipe import STACKS, Depth
from branchnorm_jax.options import ModelConfig, parse_depth

_EDGE = 1 / (1 + math.exp(5))
SHAPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda way: way,
    "adaptive": lambda way: way,
    "exp": lambda way: jnp.expm1(math.log(2) * way),
    "sigmoid": lambda way: (jax.nn.sigmoid(10 * (way - 0.5)) - _EDGE) / (1 - 2 * _EDGE),
}
"""Curves from 0 to 1. The BranchNorm paper names exp and sigmoid without formulas; this project chose these."""


class Order(NamedTuple):
    """When the layers of a stack grow.

    Attributes:
      span: (l [L], L, stagger) -> (begin_l, finish_l), fractions of T.
      power: exponent of the shape.
      start: rule for start_l (see `levels`) if `alpha_start` is empty.
      end: rule for end_l if `alpha_end` is empty. If start = end, alpha is constant and both options are ignored.
    """

    span: Callable[[np.ndarray, int, float], tuple[np.ndarray | float, np.ndarray | float]]
    power: float = 1.0
    start: str = "0"
    end: str = "1"


def _staggered(rank: Callable[[int], np.ndarray]) -> Order:
    """Returns an order in which layers start one after another: rank 0 first, rank 1 last.

    Every layer has the curve of `equal`, compressed to (1 - stagger) T.
    """
    return Order(lambda l, layers, stagger: (stagger * rank(layers), 1 - stagger + stagger * rank(layers)))


def _spread(layers: int) -> np.ndarray:
    """Returns ranks in bit-reversed order, so that started layers are spread evenly over the stack."""
    bits = max(1, (layers - 1).bit_length())
    reversed_bits = [int(f"{layer:0{bits}b}"[::-1], 2) for layer in range(layers)]
    return np.argsort(np.argsort(reversed_bits)) / max(1, layers - 1)


_EQUAL = Order(lambda l, layers, stagger: (0.0, 1.0))
_LINEAR = Order(lambda l, layers, stagger: (0.0, l / layers))
_STAGEWISE = Order(lambda l, layers, stagger: ((l - 1) / layers, l / layers))

ORDERS: dict[str, Order] = {
    # BranchNorm: all layers together.
    "equal": _EQUAL,
    # Progressive Residual Warmup (2026). The paper's T is the first layer's; `alpha_steps` is the paper's T L.
    "linear": _LINEAR,
    "linear_sqrt": _LINEAR._replace(power=0.5),
    "linear_square": _LINEAR._replace(power=2.0),
    "reverse": Order(lambda l, layers, stagger: (0.0, (layers - l + 1) / layers)),
    "stagewise_0": _STAGEWISE,
    "stagewise_L": _STAGEWISE._replace(start="1/L"),
    "stagewise_sqrt_L": _STAGEWISE._replace(start="1/sqrt(L)"),
    "stagewise_sqrt_l": _STAGEWISE._replace(start="1/sqrt(l)"),
    "fix_L": _EQUAL._replace(start="1/L", end="1/L"),
    "fix_sqrt_L": _EQUAL._replace(start="1/sqrt(L)", end="1/sqrt(L)"),
    "fix_sqrt_l": _EQUAL._replace(start="1/sqrt(l)", end="1/sqrt(l)"),
    # This project's own.
    "bottom_up": _staggered(lambda layers: np.arange(layers) / max(1, layers - 1)),
    "top_down": _staggered(lambda layers: np.arange(layers)[::-1] / max(1, layers - 1)),
    "progressive": _staggered(_spread),
}
"""alpha_order -> when each layer grows."""


class _Curve(NamedTuple):
    """The numbers of the equation for one stack, float32 [L] each."""

    begin: np.ndarray
    finish: np.ndarray
    start: np.ndarray
    end: np.ndarray


def alpha(config: ModelConfig) -> Callable[[jax.Array], Alpha]:
    """Returns alpha of every layer as a function of the clock; see the equation at the top of this module.

    Args:
      config: options alpha_schedule, alpha_steps (T), alpha_order, alpha_stagger, alpha_start and alpha_end.

    Returns:
      A function from u, int32 [], to alpha.

    Raises:
      UserError: if alpha_start or alpha_end is not a rule, or alpha would shrink.

    >>> schedule = alpha(ModelConfig(encoder_layers=2, decoder_layers=1, alpha_steps=8, alpha_order="bottom_up"))
    >>> [schedule(jnp.int32(u))["encoder"].tolist() for u in (0, 2, 4, 6, 8)]
    [[0.0, 0.0], [0.5, 0.0], [1.0, 0.0], [1.0, 0.5], [1.0, 1.0]]
    """
    shape, total, power = SHAPES[config.alpha_schedule], config.alpha_steps, ORDERS[config.alpha_order].power
    curves = {stack: _curve(config, stack) for stack in config.stacks}

    def value(curve: _Curve, clock: jax.Array) -> jax.Array:
        progress = (clock.astype(jnp.float32) / total - curve.begin) / (curve.finish - curve.begin)
        grown = shape(progress) if power == 1 else jnp.maximum(shape(progress), 0) ** power
        grown = jnp.where(progress >= 1, 1.0, jnp.where(progress <= 0, 0.0, grown)).astype(jnp.float32)
        # At T every layer has its end value, even if rounding left its progress just below 1.
        return curve.start + (curve.end - curve.start) * jnp.where(clock >= total, 1.0, grown)

    def schedule(clock: jax.Array) -> Alpha:
        return {stack: value(curve, clock) for stack, curve in curves.items()}

    return schedule


def is_uniform(config: ModelConfig) -> bool:
    """Returns whether all layers have the same alpha at all times.

    >>> is_uniform(ModelConfig(alpha_order="equal")), is_uniform(ModelConfig(alpha_order="linear"))
    (True, False)
    """
    curves = np.concatenate([np.stack(_curve(config, stack)) for stack in config.stacks], axis=1)
    return bool((curves == curves[:, :1]).all())


def starts_closed(config: ModelConfig) -> bool:
    """Returns whether, at some time, some layers still have alpha = 0 while others already grow."""
    curves = [_curve(config, stack) for stack in config.stacks]
    return any(bool(((curve.begin > 0) & (curve.start == 0)).any()) for curve in curves)


def _curve(config: ModelConfig, stack: str) -> _Curve:
    order, depth = ORDERS[config.alpha_order], Depth(config.encoder_layers, config.decoder_layers)
    layers: int = getattr(depth, stack)
    limits = (order.start, order.end)
    if order.start != order.end:
        limits = (config.alpha_start or order.start, config.alpha_end or order.end)
    start, end = (levels(rule, depth, stack) for rule in limits)
    if (start > end).any():
        raise UserError(
            f"config: alpha cannot shrink: at {config.depth} model.alpha_start="
            f"{limits[0]} is above model.alpha_end={limits[1]}; set model.alpha_end to a larger value, at most 1"
        )
    start, end = (np.where(old_layers(config, stack), 1.0, limit) for limit in (start, end))
    span = order.span(np.arange(1, layers + 1), layers, config.alpha_stagger)
    begin, finish = (np.broadcast_to(np.asarray(share), (layers,)) for share in span)
    return _Curve(*(np.asarray(values, np.float32) for values in (begin, finish, start, end)))


def old_layers(config: ModelConfig, stack: str) -> np.ndarray:
    """Returns whether each layer comes from a shallower model, bool [L]; none does without `grown_from`.

    They are spread evenly, and the first layer is the first of them.

    Raises:
      UserError: if `grown_from` is not a depth, or is deeper than the model.

    >>> old_layers(ModelConfig(encoder_layers=8, decoder_layers=5, grown_from="3L-2L"), "encoder").nonzero()
    (array([0, 2, 5]),)
    """
    layers: int = getattr(config, f"{stack}_layers")
    if not config.grown_from:
        return np.zeros(layers, bool)
    depth = parse_depth(config.grown_from)
    count = depth[STACKS.index(stack)] if depth else 0
    if not 0 < count <= layers:
        raise UserError(f"config: model.grown_from={config.grown_from!r} is not a depth of at most {config.depth}")
    return np.isin(np.arange(layers), np.arange(count) * layers // count)


_RULE = re.compile(r"(?P<c>\d+\.?\d*(?:e-?\d+)?)(?:/(?:(?P<root>sqrt|cbrt)\()?(?P<count>[nLl])(?(root)\)))?")
_ROOTS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {"sqrt": np.sqrt, "cbrt": np.cbrt, None: np.asarray}


def levels(rule: str, depth: Depth, stack: str) -> np.ndarray:
    """Evaluates a rule for the limits of alpha in the layers of a stack: float64 [L], at most 1.

    Args:
      rule: a number c; c/n, c/L or c/l; c/sqrt(...) or c/cbrt(...), the cube root, of one of these; or "deepnorm",
        DeepNorm's ratio of branch to skip, 1 / a. n is the number of residual sub-layers of the stack
        (`Depth.sublayers`), L the number of its layers, and l the layer, counted from 1.
      depth: depth of the model.
      stack: "encoder" or "decoder".

    Raises:
      UserError: if the rule is none of these, or a number above 1.

    >>> levels("1/l", Depth(4, 1), "encoder").round(2).tolist()
    [1.0, 0.5, 0.33, 0.25]
    >>> levels("6/sqrt(n)", Depth(2, 50), "decoder").round(2)[:3].tolist()  # n = 3 x 50
    [0.49, 0.49, 0.49]
    """
    layers: int = getattr(depth, stack)
    if rule == "deepnorm":
        return np.broadcast_to(np.minimum(1.0, 1 / np.asarray(getattr(deepnorm_alpha(depth), stack))), (layers,))
    match = _RULE.fullmatch(rule)
    if match is None or (not match["count"] and float(match["c"]) > 1):
        raise UserError(
            f"config: model.alpha_start or model.alpha_end: {rule!r} is not a number from 0 to 1, a rule such as "
            "6/sqrt(n), 1/L or 1/sqrt(l), or deepnorm"
        )
    n = getattr(depth.sublayers, stack)
    counts = {"n": n, "L": layers, "l": np.arange(1, layers + 1), None: 1}
    count = np.asarray(counts[match["count"]], np.float64)
    return np.minimum(1.0, np.broadcast_to(float(match["c"]) / _ROOTS[match["root"]](count), (layers,)))
