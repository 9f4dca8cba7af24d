"""Every method as data: one `Recipe` per row, in the residual algebra

    z  = Q(x)                     pre-norm or identity
    h  = Dropout(F(z))            F: attention or feed-forward
    x' = P(a x + b h)             post-norm or identity

A recipe says which of Q and P are norms, what `a` and `b` are, and how the weights start. `blocks.py` reads recipes and
knows no method by name; to add a method, add a row to `METHODS`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from branchnorm_jax.errors import UserError


class Depth(NamedTuple):
    """Layers of the encoder (N in the papers) and of the decoder (M)."""

    encoder: int
    decoder: int


class PerStack(NamedTuple):
    """One number for the encoder's layers and one for the decoder's."""

    encoder: float
    decoder: float


DepthRule = Callable[[Depth], PerStack]


def one(depth: Depth) -> PerStack:
    """1 in both stacks, whatever the depth."""
    return PerStack(1.0, 1.0)


def deepnorm_alpha(depth: Depth) -> PerStack:
    """DeepNorm's skip weight: 0.81 (N^4 M)^(1/16) in the encoder, (3M)^(1/4) in the decoder."""
    n, m = depth
    return PerStack(0.81 * (n**4 * m) ** (1 / 16), (3 * m) ** (1 / 4))


def deepnorm_beta(depth: Depth) -> PerStack:
    """DeepNorm's initial gain: 0.87 (N^4 M)^(-1/16) in the encoder, (12M)^(-1/4) in the decoder."""
    n, m = depth
    return PerStack(0.87 * (n**4 * m) ** (-1 / 16), (12 * m) ** (-1 / 4))


DEEPNORM_GAIN: Mapping[str, DepthRule] = {matrix: deepnorm_beta for matrix in ("v", "o", "fc1", "fc2")}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One method.

    Attributes:
      equation: the sub-layer update, for people.
      citation: where it comes from.
      pre: Q is a norm.
      post: P is a norm.
      final: a norm follows the last layer of each stack.
      skip: `a` as a function of depth.
      scheduled: `b` is the branch scale alpha_t that training passes in; otherwise `b` is 1.
      init: base distribution of the weights, a key of `initializers.BASES`.
      gain: factors on the base, by matrix ("v") or by sub-layer and matrix ("cross/v", which wins).
    """

    equation: str
    citation: str
    pre: bool = False
    post: bool = False
    final: bool = False
    skip: DepthRule = one
    scheduled: bool = False
    init: str = "xavier_uniform"
    gain: Mapping[str, DepthRule] = dataclasses.field(default_factory=dict, hash=False)


METHODS: dict[str, Recipe] = {
    "post_ln": Recipe(
        equation="x' = LN(x + F(x))",
        citation="Attention Is All You Need (Vaswani et al., 2017)",
        post=True,
    ),
    "pre_ln": Recipe(
        equation="x' = x + F(LN(x))",
        citation="Learning Deep Transformer Models for Machine Translation (Wang et al., 2019)",
        pre=True,
        final=True,
    ),
    "deepnorm": Recipe(
        equation="x' = LN(a x + F(x)), a from the depth",
        citation="DeepNet: Scaling Transformers to 1,000 Layers (Wang et al., 2022)",
        post=True,
        skip=deepnorm_alpha,
        init="xavier_normal",
        gain=DEEPNORM_GAIN,
    ),
    "branchnorm": Recipe(
        equation="x' = LN(x + alpha_t F(x)), alpha_t = min(1, t/T)",
        citation="BranchNorm: Robustly Scaling Extremely Deep Transformers (Liu et al., 2023)",
        post=True,
        scheduled=True,
        init="xavier_normal",
        gain=DEEPNORM_GAIN,
    ),
}


def get_recipe(method: str) -> Recipe:
    """The recipe of that name. Raises `UserError` with the known names."""
    if method not in METHODS:
        raise UserError(f"config: model.method={method!r} is not one of {', '.join(METHODS)}")
    return METHODS[method]
