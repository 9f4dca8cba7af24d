"""Compares the smoothed loss and its gradient with optax's one-hot form.

    python -m benchmarks.loss

Measures memory and time for 4096 tokens and 32,000 words.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.measure import alternate, save
from branchnorm_jax.model.losses import Blocks, smoothed_cross_entropy
from branchnorm_jax.model.output import Output

ROWS, LENGTH, WORDS, WIDTH, SMOOTHING = 128, 32, 32_000, 512, 0.1


def ours(x: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean loss, computed in blocks."""
    output, weights = Output(table, None, jnp.ones(WORDS, bool)), jnp.ones((ROWS, LENGTH))
    return smoothed_cross_entropy(x, output, targets, weights, SMOOTHING, Blocks(2**25)).loss / weights.size


def one_hot(x: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the same loss from whole logits and one-hot targets.

    optax spreads eps over all V tokens, we over V - 1, so eps is scaled by V / (V - 1).
    """
    wanted = optax.smooth_labels(jax.nn.one_hot(targets, WORDS), SMOOTHING * WORDS / (WORDS - 1))
    return optax.softmax_cross_entropy(x @ table.T, wanted).mean()


def main() -> None:
    """Compiles both versions, compares their results and times them alternately."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (ROWS, LENGTH, WIDTH))
    table = WIDTH**-0.5 * jax.random.normal(keys[1], (WORDS, WIDTH))
    targets = jax.random.randint(keys[2], (ROWS, LENGTH), 0, WORDS)
    arguments = x, table, targets
    compiled: list[Any] = [
        jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(*arguments).compile() for f in (ours, one_hot)
    ]
    (loss, gradient), (expected_loss, expected) = (f(*arguments) for f in compiled)
    temporary = [f.memory_analysis().temp_size_in_bytes for f in compiled]
    norm = optax.tree.norm(expected)
    save(
        "loss",
        {
            "temporary_bytes": temporary,
            "temporary_share": temporary[0] / temporary[1],
            "loss_error": abs(float(loss / expected_loss) - 1),
            "gradient_error": float(optax.tree.norm(jax.tree.map(jnp.subtract, gradient, expected)) / norm),
            "time": alternate(lambda: compiled[0](*arguments), lambda: compiled[1](*arguments)),
        },
    )


if __name__ == "__main__":
    main()
