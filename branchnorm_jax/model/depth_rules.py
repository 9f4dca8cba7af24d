"""The rules of the recipes. A rule maps the depth of a model to one number per stack or per layer.

N and M are the numbers of encoder and decoder layers; l counts the layers of a stack from 1.
"""

import math

from branchnorm_jax.model.recipe import Depth, PerStack, Rule


def deepnorm_alpha(depth: Depth) -> PerStack:
    """Returns DeepNorm's skip weight: 0.81 (N^4 M)^(1/16) in the encoder, (3M)^(1/4) in the decoder.

    >>> skip = deepnorm_alpha(Depth(100, 100))
    >>> round(skip.encoder, 2), round(skip.decoder, 2)
    (3.42, 4.16)
    """
    n, m = depth
    return PerStack(0.81 * (n**4 * m) ** (1 / 16), (3 * m) ** (1 / 4))


def deepnorm_beta(depth: Depth) -> PerStack:
    """Returns DeepNorm's initial gain: 0.87 (N^4 M)^(-1/16) in the encoder, (12M)^(-1/4) in the decoder."""
    n, m = depth
    return PerStack(0.87 * (n**4 * m) ** (-1 / 16), (12 * m) ** (-1 / 4))


def torchscale_beta(depth: Depth) -> PerStack:
    """Returns the gain of DeepNorm's official code. In the encoder it is 1.32 times the paper's gain."""
    n, m = depth
    return PerStack(1.15 * (n**4 * m) ** (-1 / 16), (12 * m) ** (-1 / 4))


def sub_ln_gamma(depth: Depth) -> PerStack:
    """Returns Sub-LN's initial gain: sqrt(ln(3M) ln(2N) / 3) in the encoder, sqrt(ln(3M)) in the decoder."""
    n, m = depth
    return PerStack(math.sqrt(math.log(3 * m) * math.log(2 * n) / 3), math.sqrt(math.log(3 * m)))


def t_fixup_gain(depth: Depth) -> PerStack:
    """Returns T-Fixup's gain of the matrices: 0.67 N^(-1/4) in the encoder, (9M)^(-1/4) in the decoder."""
    return PerStack(0.67 * depth.encoder**-0.25, (9 * depth.decoder) ** -0.25)


def t_fixup_embedding_gain(depth: Depth) -> PerStack:
    """Returns T-Fixup's gain of the embeddings: (9N)^(-1/4) of source or shared, (9M)^(-1/4) of target."""
    return PerStack((9 * depth.encoder) ** -0.25, (9 * depth.decoder) ** -0.25)


def branches_power(power: float) -> Rule:
    """Returns the rule (2N + 3M)^power, where 2N + 3M is the number of residual branches of the model."""

    def rule(depth: Depth) -> PerStack:
        value = (2 * depth.encoder + 3 * depth.decoder) ** power
        return PerStack(value, value)

    return rule


def depth_power(power: float) -> Rule:
    """Returns the rule N^power in the encoder and M^power in the decoder."""
    return lambda depth: PerStack(depth.encoder**power, depth.decoder**power)


def layer_power(power: float) -> Rule:
    """Returns the rule l^power in layer l, counted from 1 in each stack."""
    return lambda depth: PerStack(*(tuple((l + 1) ** power for l in range(layers)) for layers in depth))  # noqa: E741


def keel_skip(depth: Depth) -> PerStack:
    """Returns Keel's skip weight: the number of sub-layers of the stack, 2N or 3M; 1 in the first layer.

    >>> keel_skip(Depth(3, 2))
    PerStack(encoder=(1.0, 6.0, 6.0), decoder=(1.0, 6.0))
    """
    n, m = depth
    return PerStack((1.0, *[2.0 * n] * (n - 1)), (1.0, *[3.0 * m] * (m - 1)))


def after_first(depth: Depth) -> PerStack:
    """Returns 0 in the first layer and 1 in the others."""
    return PerStack(*((0.0, *[1.0] * (layers - 1)) for layers in depth))


def admin_log(depth: Depth) -> PerStack:
    """sqrt((n + 1) / ln(n + 1) - 1) for n sub-layers: Admin's skip weight for output changes of order log n."""
    return PerStack(*(math.sqrt((n + 1) / math.log(n + 1) - 1) for n in (2 * depth.encoder, 3 * depth.decoder)))


def admin_constant(depth: Depth) -> PerStack:
    """sqrt(n) for n sub-layers: Admin's skip weight for output changes of order 1."""
    return PerStack(math.sqrt(2 * depth.encoder), math.sqrt(3 * depth.decoder))


def layerscale_start(depth: Depth) -> PerStack:
    """Returns LayerScale's initial value by depth of the stack: 0.1 up to 18 layers, 1e-5 up to 24, then 1e-6."""
    return PerStack(*(0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6 for layers in depth))


def first_quarter(depth: Depth) -> PerStack:
    """Returns 1 in the first quarter of the layers (rounded down) and 0 in the others.

    >>> first_quarter(Depth(8, 3))
    PerStack(encoder=(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), decoder=(0.0, 0.0, 0.0))
    """
    return PerStack(*(tuple(float(l < layers // 4) for l in range(layers)) for layers in depth))  # noqa: E741
