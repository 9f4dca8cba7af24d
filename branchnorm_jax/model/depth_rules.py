"""The rules of the recipes. A rule maps the depth of a model to one number per stack or per layer.

N and M are the numbers of encoder and decoder layers; l counts the layers of a stack from 1. n is the number of
residual sub-layers of a stack: 2N in the encoder and 3M in the decoder, or 2M in a decoder-only model. In a
decoder-only model (N = 0), the encoder's value is not used.
"""

import functools
import math

from branchnorm_jax.model.recipe import Depth, PerStack, Rule


def deepnorm_alpha(depth: Depth) -> PerStack:
    """Returns DeepNorm's skip weight: 0.81 (N^4 M)^(1/16) in the encoder, n^(1/4) in the decoder.

    >>> skip = deepnorm_alpha(Depth(100, 100))
    >>> round(skip.encoder, 2), round(skip.decoder, 2)
    (3.42, 4.16)
    """
    return PerStack(0.81 * _product(depth) ** (1 / 16), depth.sublayers.decoder ** (1 / 4))


def deepnorm_beta(depth: Depth) -> PerStack:
    """Returns DeepNorm's initial gain: 0.87 (N^4 M)^(-1/16) in the encoder, (4n)^(-1/4) in the decoder."""
    return PerStack(0.87 * _product(depth) ** (-1 / 16), (4 * depth.sublayers.decoder) ** (-1 / 4))


def torchscale_beta(depth: Depth) -> PerStack:
    """Returns the gain of DeepNorm's official code. In the encoder it is 1.32 times the paper's gain."""
    return PerStack(1.15 * _product(depth) ** (-1 / 16), (4 * depth.sublayers.decoder) ** (-1 / 4))


def _product(depth: Depth) -> int:
    """Returns N^4 M, which occurs in the encoder's rules of DeepNorm."""
    return max(1, depth.encoder) ** 4 * depth.decoder


def sub_ln_gamma(depth: Depth) -> PerStack:
    """Returns Sub-LN's initial gain: sqrt(ln(3M) ln(2N) / 3) in the encoder, sqrt(ln(n)) in the decoder."""
    n, m = (math.log(max(1, count)) for count in depth.sublayers)
    return PerStack(math.sqrt(m * n / 3), math.sqrt(m))


def t_fixup_gain(depth: Depth) -> PerStack:
    """Returns T-Fixup's gain of the matrices: 0.67 N^(-1/4) in the encoder, (9M)^(-1/4) in the decoder.

    The layers of a decoder-only model have the sub-layers of an encoder, and so the encoder's gain.
    """
    decoder = (9 * depth.decoder) ** -0.25 if depth.encoder else 0.67 * depth.decoder**-0.25
    return PerStack(0.67 * max(1, depth.encoder) ** -0.25, decoder)


def t_fixup_embedding_gain(depth: Depth) -> PerStack:
    """Returns T-Fixup's gain of the embeddings: (9N)^(-1/4) of source or shared, (9M)^(-1/4) of target."""
    return PerStack((9 * max(1, depth.encoder)) ** -0.25, (9 * depth.decoder) ** -0.25)


def branches_power(power: float) -> Rule:
    """Returns the rule (2N + 3M)^power: the number of residual branches of the model, 2M if it is decoder-only."""

    def rule(depth: Depth) -> PerStack:
        value = sum(depth.sublayers) ** power
        return PerStack(value, value)

    return rule


def sublayers_power(power: float) -> Rule:
    """Returns the rule n^power."""
    return lambda depth: PerStack(*(float(max(1, n)) ** power for n in depth.sublayers))


def sublayers_so_far_power(power: float) -> Rule:
    """Returns the rule s^power in layer l, with s the number of sub-layers up to and with this layer: 2 l or 3 l."""

    def layer_by_layer(n: int, layers: int) -> tuple[float, ...]:
        return tuple((n // layers * l) ** power for l in range(1, layers + 1))

    def rule(depth: Depth) -> PerStack:
        return PerStack(*map(layer_by_layer, depth.sublayers, depth))

    return rule


def depth_power(power: float) -> Rule:
    """Returns the rule N^power in the encoder and M^power in the decoder."""
    return lambda depth: PerStack(max(1, depth.encoder) ** power, depth.decoder**power)


def relative_depth(base_layers: int, power: float = 1.0) -> Rule:
    """Returns the rule m^power, where m is the number of the stack's layers divided by `base_layers`.

    >>> relative_depth(2)(Depth(8, 6))
    PerStack(encoder=4.0, decoder=3.0)
    """
    return lambda depth: PerStack(*((max(1, layers) / base_layers) ** power for layers in depth))


def layer_power(power: float) -> Rule:
    """Returns the rule l^power in layer l, counted from 1 in each stack."""
    return lambda depth: PerStack(*(tuple((l + 1) ** power for l in range(layers)) for layers in depth))


def keel_skip(depth: Depth) -> PerStack:
    """Returns Keel's skip weight: n, the number of sub-layers of the stack; 1 in the first layer.

    >>> keel_skip(Depth(3, 2))
    PerStack(encoder=(1.0, 6.0, 6.0), decoder=(1.0, 6.0))
    """
    return PerStack(*((1.0, *[float(n)] * (layers - 1)) for n, layers in zip(depth.sublayers, depth, strict=True)))


def after_first(depth: Depth) -> PerStack:
    """Returns 0 in the first layer and 1 in the others."""
    return PerStack(*((0.0, *[1.0] * (layers - 1)) for layers in depth))


def admin_log(depth: Depth) -> PerStack:
    """sqrt((n + 1) / ln(n + 1) - 1) for n sub-layers: Admin's skip weight for output changes of order log n."""
    return PerStack(
        *(math.sqrt((n + 1) / math.log(n + 1) - 1) for n in map(functools.partial(max, 1), depth.sublayers))
    )


def admin_constant(depth: Depth) -> PerStack:
    """sqrt(n) for n sub-layers: Admin's skip weight for output changes of order 1."""
    return PerStack(*map(math.sqrt, depth.sublayers))


def layerscale_start(depth: Depth) -> PerStack:
    """Returns LayerScale's initial value by depth of the stack: 0.1 up to 18 layers, 1e-5 up to 24, then 1e-6."""
    return PerStack(*(0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6 for layers in depth))


def first_quarter(depth: Depth) -> PerStack:
    """Returns 1 in the first quarter of the layers (rounded down) and 0 in the others.

    >>> first_quarter(Depth(8, 3))
    PerStack(encoder=(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), decoder=(0.0, 0.0, 0.0))
    """
    return PerStack(*(tuple(float(l < layers // 4) for l in range(layers)) for layers in depth))
