"""Initial weights: a base distribution per matrix, multiplied by a gain per stack, sub-layer and layer.

The fans are d_in and d_out of one layer's matrix, not of the stacked leaf [L, d_in, d_out] and not of a head.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branchnorm_jax.errors import UserError

Initializer = Callable[[jax.Array, tuple[int, ...], int, int], jax.Array]
"""(key, shape, d_in, d_out) -> float32 array of `shape`, drawn for a matrix with these fans."""


def xavier_uniform(gain: float) -> Initializer:
    """U(-b, b) with b = gain sqrt(6 / (d_in + d_out)) (Glorot and Bengio, 2010)."""

    def draw(key: jax.Array, shape: tuple[int, ...], d_in: int, d_out: int) -> jax.Array:
        bound = gain * (6 / (d_in + d_out)) ** 0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return draw


def xavier_normal(gain: float) -> Initializer:
    """N(0, std = gain sqrt(2 / (d_in + d_out)))."""

    def draw(key: jax.Array, shape: tuple[int, ...], d_in: int, d_out: int) -> jax.Array:
        return gain * (2 / (d_in + d_out)) ** 0.5 * jax.random.normal(key, shape, jnp.float32)

    return draw


def small_init(key: jax.Array, shape: tuple[int, ...], d_in: int, d_out: int) -> jax.Array:
    """N(0, variance = 2 / (5 D)) for a [D, D] matrix of attention (Nguyen and Salazar, 2019)."""
    return (2 / (5 * d_in)) ** 0.5 * jax.random.normal(key, shape, jnp.float32)


def torch_default(key: jax.Array, shape: tuple[int, ...], d_in: int, d_out: int) -> jax.Array:
    """U(-1/sqrt(d_in), 1/sqrt(d_in)), the default of PyTorch's Linear for kernel and bias."""
    return jax.random.uniform(key, shape, jnp.float32, -(d_in**-0.5), d_in**-0.5)


def zeros(key: jax.Array, shape: tuple[int, ...], d_in: int, d_out: int) -> jax.Array:
    """Returns zeros."""
    return jnp.zeros(shape, jnp.float32)


class Base(NamedTuple):
    """Initialisers of kernels and biases by matrix name: q, k, v, o, fc1, fc2 (and gate, drawn as fc1)."""

    kernel: Mapping[str, Initializer]
    bias: Mapping[str, Initializer]


MATRICES: dict[str, tuple[str, str]] = {
    "q": ("embed", "heads"),
    "k": ("embed", "heads"),
    "v": ("embed", "heads"),
    "o": ("heads", "embed"),
    "fc1": ("embed", "ffn"),
    "gate": ("embed", "ffn"),
    "fc2": ("ffn", "embed"),
}
"""The matrices of the sub-layers, and the logical names of their axes."""

LAST_MATRIX = {"self": "o", "cross": "o", "ffn": "fc2"}
"""The last matrix of each branch."""


def _base(default: Initializer, bias: Initializer = zeros, **exceptions: Initializer) -> Base:
    return Base({matrix: exceptions.get(matrix, default) for matrix in MATRICES}, dict.fromkeys(MATRICES, bias))


_qkv = dict.fromkeys(("q", "k", "v"), xavier_uniform(2**-0.5))

BASES: dict[str, Base] = {
    # fairseq up to 0.9, Admin, T-Fixup. The gain of q, k and v is that of a fused [D, 3D] matrix.
    "xavier_uniform": _base(xavier_uniform(1.0), **_qkv),
    # DeepNet, BranchNorm.
    "xavier_normal": _base(xavier_normal(1.0)),
    # Transformers without Tears.
    "small": _base(xavier_normal(1.0), **dict.fromkeys(("q", "k", "v", "o"), small_init)),
    # torchscale: torch.nn.Linear everywhere.
    "torch": _base(torch_default, bias=torch_default),
    # fairseq since 0.10: feed-forward as torch.nn.Linear, and random biases except for o.
    "fairseq": Base(
        kernel=_base(torch_default, o=xavier_uniform(1.0), **_qkv).kernel,
        bias={**_base(zeros, bias=torch_default).bias, "o": zeros},
    ),
}


def get_base(name: str) -> Base:
    """Returns the base distribution with this name. Raises `UserError` if the name is unknown."""
    if name not in BASES:
        raise UserError(f"config: model.init={name!r} is not one of {', '.join(BASES)}")
    return BASES[name]
