"""Stacks: one layer applied L times to stacked parameters, and the choice of what the backward pass stores."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Carry = Any
PerLayer = Any
Layer = Callable[[Carry, PerLayer], tuple[Carry, PerLayer]]

POLICIES: dict[str, Any] = {
    "save_branches": jax.checkpoint_policies.save_only_these_names("projection", "context", "branch"),
    "full": None,
    "nested": None,
}
"""What the backward pass stores of a layer in addition to its input. `attention.py` and `blocks.py` set the names."""

REMAT = ("none", *POLICIES)
"""All values of `remat` in `run_stack`."""


def run_stack(
    layer: Layer,
    carry: Carry,
    per_layer: PerLayer,
    *,
    remat: str = "none",
    group: int = 0,
    unroll: int = 1,
) -> tuple[Carry, PerLayer]:
    """Computes carry, out_l = layer(carry, per_layer_l) for l = 0 .. L-1.

    All options give the same numbers up to rounding. Let c be the bytes of a carry (D numbers per token), and u the
    bytes of D numbers per token in the compute type. For an encoder layer with F = 4 D, the backward pass stores and
    recomputes:

    | remat         | per layer      | in total                  | recomputed                  |
    |---------------|----------------|---------------------------|-----------------------------|
    | none          | c + about 12 u | L (c + 12 u)              | nothing                     |
    | save_branches | c + 6 u        | L (c + 6 u)               | fc1, scores, norms: 1/3 of a forward pass |
    | full          | 1/g of c       | (L / g) c + g (c + 12 u)  | one forward pass: 1/3 more time |
    | nested        | 1/g of c       | (L / g) c + g (c + 2 p)   | two forward passes: 2/3 more time |

    `full` and `nested` divide the layers into groups of g, store the carry before each group, and run the group again
    in the backward pass. `full` then stores what `none` does, for one group at a time. The layers of a group are not a
    loop, which would copy what it stores to stacked arrays: so compile time grows with g. `nested` runs the group with
    `full` and g = 1. It also holds a copy of the group's parameters and of their gradients, p bytes per layer each.

    Args:
      layer: a pure function.
      carry: input of the first layer; its types and shapes do not change.
      per_layer: tree of [L, ...] leaves: parameters, coefficients, keys, caches. A list of L trees (see `unstack`) runs
        as a Python loop that ignores the options below and returns its outputs as a list.
      remat: one of `REMAT`; "auto" means "none" here.
      group: g; 0 means 1 for `full`, and `best_group` for `nested`. If g does not divide L, the last group is shorter.
      unroll: layers per iteration of `lax.scan`; 0 means 1. With less than L, compile time does not depend on L. With L
        or more, there is no loop: XLA can optimise across layers, but compile time and program size grow with L.

    Returns:
      The last carry, and the outputs stacked to [L, ...] leaves.
    """
    if isinstance(per_layer, list):
        outputs = []
        for each in per_layer:
            carry, output = layer(carry, each)
            outputs.append(output)
        return carry, outputs
    depth, unroll = depth_of(per_layer), unroll or 1
    if remat == "nested":
        group = min(group or best_group(depth, size_of(carry), size_of(per_layer) / depth), depth)
    elif remat != "full" or group < 2:
        return jax.lax.scan(rematerialised(layer, remat, looped=unroll < depth), carry, per_layer, unroll=unroll)
    run_group = functools.partial(_run_group, layer, remat, unroll)
    group = min(group, depth)
    whole = depth - depth % group
    groups = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, group, *leaf.shape[1:]), per_layer)
    carry, outputs = jax.lax.scan(rematerialised(run_group, remat, looped=group < whole), carry, groups)
    outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
    if whole < depth:
        rest = jax.tree.map(lambda leaf: leaf[whole:], per_layer)
        carry, last = rematerialised(run_group, remat)(carry, rest)
        outputs = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), outputs, last)
    return carry, outputs


def _run_group(layer: Layer, remat: str, unroll: int, carry: Carry, layers: PerLayer) -> tuple[Carry, PerLayer]:
    """Runs a group of layers, which the backward pass runs again.

    With `full`, what the layers store is kept in between. There is no loop, which would copy it to stacked arrays.
    """
    count = depth_of(layers)
    if remat == "nested":
        return jax.lax.scan(rematerialised(layer, "full", looped=unroll < count), carry, layers, unroll=unroll)
    return jax.lax.scan(rematerialised(layer, "none"), carry, layers, unroll=count)


def unstack(per_layer: PerLayer) -> list[PerLayer]:
    """Splits a tree of [L, ...] leaves into L trees.

    In a loop, the compiled program copies each layer's slices before it uses them in a product. Decoding reads all
    parameters and caches for only a few tokens, so these copies would take a large part of its time.
    """
    return [jax.tree.map(lambda leaf, index=index: leaf[index], per_layer) for index in range(depth_of(per_layer))]


class LayerUpdate(NamedTuple):
    """How the backward pass updates layers.

    Attributes:
      apply: (parameters, gradient, moments) -> (new parameters, new moments, figures), trees of [g, ...] leaves each.
      moments: the optimiser's state of each layer, [L, ...] leaves.
      figures: placeholders for the statistics that `apply` returns, [L, ...] leaves; only their shapes are used.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    moments: Any
    figures: Any


def run_and_update(
    layer: Layer, carry: Carry, params: Any, given: Any, update: LayerUpdate, *, remat: str = "full", group: int = 0
) -> tuple[Carry, PerLayer]:
    """Runs `run_stack` with remat full or nested; the backward pass also updates the parameters.

    The backward pass gives the gradient of a group of layers to `update.apply` and then drops it. The gradients of all
    layers, 4 of the 16 bytes that a parameter needs under Adam, never exist at the same time. New parameters and
    moments replace the old ones in place. A custom gradient must return values with the shapes of `params`,
    `update.moments` and `update.figures`. **These returned values are not gradients but the new values.** All other
    values that `layer` depends on get their gradients.

    The result is exact if the update of a layer depends on no other gradient: no clipping by a global norm, and no
    accumulation. The outputs of the layers have no gradient. Prior art: LOMO (*Full Parameter Fine-tuning for Large
    Language Models with Limited Resources*, Lv et al., 2023).

    Args:
      layer: as for `run_stack`; it takes (params_l, *given_l).
      carry: input of the first layer.
      params: learned parameters, [L, ...] leaves; no other computation may use them.
      given: other inputs of the layers, a tuple of trees of [L, ...] leaves; they get no gradient.
      update: see `LayerUpdate`.
      remat: "full" recomputes a group of layers once, "nested" twice. Each group is updated at once.
      group: layers per group, a divisor of L. 0 means 1 for full, and for nested the divisor that needs about the least
        memory.

    Returns:
      As `run_stack`.
    """
    depth = depth_of(params)
    best = best_group(depth, size_of(carry), size_of(params) / depth, whole=True) if remat == "nested" else 1
    group = min(group or best, depth)
    if depth % group:
        raise ValueError(f"groups of {group} do not divide {depth} layers")
    count = depth // group

    def run_group(carry: Carry, per_layer: PerLayer) -> tuple[Carry, PerLayer]:
        # The backward pass recomputes a group in any case.
        return _run_group(layer, remat if group > 1 else "full", 1, carry, per_layer)

    # Differentiable values that the layers close over, such as the encoder's output, become arguments.
    first = jax.tree.map(lambda leaf: leaf[:group], (params, *given))
    pure, shared = jax.closure_convert(run_group, carry, first)

    @jax.custom_vjp
    def run(carry: Carry, shared: Any, learned: Any) -> tuple[Carry, PerLayer]:
        return forward(carry, shared, learned)[0]

    def forward(carry: Carry, shared: Any, learned: Any) -> tuple[Any, Any]:
        def step(carry: Carry, index: jax.Array) -> tuple[Carry, Any]:
            after, outputs = pure(carry, _read_group((learned[0], *given), index, group), *shared)
            return after, (carry, outputs)

        carry, (carries, outputs) = jax.lax.scan(step, carry, jnp.arange(count))
        outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
        return (carry, outputs), (carries, shared, learned)

    def backward(saved: Any, gradient: Any) -> Any:
        carries, shared, learned = saved

        def one_group(carry: Carry, by_carry: Carry, given: Any, learned: Any) -> tuple[Any, ...]:
            def group(carry: Carry, shared: Any, params: Any) -> Carry:
                return pure(carry, (params, *given), *shared)[0]

            params, moments, _ = learned
            by_carry, by_shared, by_params = jax.vjp(group, carry, shared, params)[1](by_carry)
            return by_carry, by_shared, update.apply(params, by_params, moments)

        def no_group(carry: Carry, by_carry: Carry, given: Any, learned: Any) -> tuple[Any, ...]:
            return by_carry, jax.tree.map(jnp.zeros_like, shared), learned

        def step(state: Any, scanned: Any) -> tuple[Any, None]:
            (by_carry, by_shared, learned), (index, carry) = state, scanned
            old = _read_group((given, learned), index, group)
            # `no_group` never runs. Without the conditional, XLA reads the old values while it writes the new ones, and
            # copies all of them first. An optimization barrier does not help: XLA removes it before fusion.
            by_carry, more, new = jax.lax.cond(index >= 0, one_group, no_group, carry, by_carry, *old)
            return (by_carry, jax.tree.map(jnp.add, by_shared, more), _write_group(learned, index, new)), None

        state = (gradient[0], jax.tree.map(jnp.zeros_like, shared), learned)
        return jax.lax.scan(step, state, (jnp.arange(count), carries), reverse=True)[0]

    run.defvjp(forward, backward)
    return run(carry, shared, (params, update.moments, update.figures))


def _read_group(tree: Any, index: jax.Array, group: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * group, group), tree)


def _write_group(tree: Any, index: jax.Array, values: Any) -> Any:
    def write(x: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, value, index * value.shape[0], 0)

    return jax.tree.map(write, tree, values)


def recomputes(remat: str) -> bool:
    """Returns whether the backward pass computes each layer again; with "none" and "auto" it does not."""
    return remat not in ("none", "auto")


def rematerialised(layer: Layer, remat: str, looped: bool = False) -> Layer:
    """Returns the layer with the rematerialisation policy `remat`.

    `looped` promises that the layer runs in a loop of the compiled program. There XLA cannot merge the recomputation
    with the first computation. Outside of a loop, a barrier prevents the merge.
    """
    if not recomputes(remat):
        return layer
    return jax.checkpoint(layer, policy=POLICIES[remat], prevent_cse=not looped)


def best_group(depth: int, carry_bytes: float, layer_bytes: float, whole: bool = False) -> int:
    """Returns the group size g that needs about the least memory, see `run_stack`.

    The minimum of (L / g) c + g (c + 2 p) is at g = sqrt(L c / (c + 2 p)). It is flat, and a remainder would copy all
    parameters once. Therefore the result is the nearest divisor of L if there is one within a factor of 1.5, or if
    `whole` is True.

    >>> best_group(100, carry_bytes=1e6, layer_bytes=0), best_group(100, carry_bytes=1e6, layer_bytes=1.5e6)
    (10, 5)
    >>> best_group(101, carry_bytes=1e6, layer_bytes=0), best_group(101, carry_bytes=1e6, layer_bytes=0, whole=True)
    (10, 1)
    """
    best = math.sqrt(depth * carry_bytes / (carry_bytes + 2 * layer_bytes))
    divisors = [g for g in range(1, depth + 1) if depth % g == 0]
    nearest = min(divisors, key=lambda g: abs(math.log(g / best)))
    return nearest if whole or abs(math.log(nearest / best)) <= math.log(1.5) else max(1, round(best))


def depth_of(per_layer: PerLayer) -> int:
    """Returns L of a tree of [L, ...] leaves."""
    return jax.tree.leaves(per_layer)[0].shape[0]


def size_of(tree: Any) -> int:
    """Returns the number of bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
