r"""Fully connected ReLU networks of 1 to 10,000 layers on CIFAR-10 (*ReZero is All You Need*, Section 4).

    python -m experiments.deep_mlp --data=<npz file> --width=64 --batch=50 --epochs=15 --depth=32,128 \
        --method=vanilla,residual,norm,pre_norm,post_norm,rezero
    python -m experiments.deep_mlp --data=<npz file> --width=64 --batch=50 --epochs=12 --depth=10000 \
        --method=rezero --learning_rate=0.001

With 2,000 images, 15 epochs of width 64 take 5 seconds of one CPU core (AMD EPYC) at 32 layers and 7 at 128.
--data=tfds downloads all of CIFAR-10.

The network maps an image to x_0 = V image, applies L layers to it, and returns the logits U x_L. A layer changes x by
F(x) = relu(W x), combined with a skip connection, LayerNorm or a learned residual weight; see `METHODS`. There are no
biases outside of LayerNorm.

The results are one line of JSON per run, in runs/deep_mlp.jsonl. A second call with the same flags only draws the
figures: loss by depth, epochs to a training accuracy of 80 % by depth, and the singular values of the Jacobian
dx_L / dx_0 during training.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from branchnorm_jax.model.norms import layer_norm
from branchnorm_jax.model.stack import REMAT, run_stack
from branchnorm_jax.training.lower import allocated_bytes
from experiments import mlp_figures, runs
from experiments.cifar import CLASSES, Images, Split

Params = dict[str, Any]
State = tuple[Params, Any]


class Method(NamedTuple):
    """A row of the paper's Table 1, x' = P(s x + r F(Q(x))).

    Attributes:
      equation: the layer.
      skip: s, whether there is a skip connection.
      norm: where LayerNorm is, "before" (Q) or "after" (P); "" for none.
      weighted: whether r is a learned scalar per layer that starts at 0; otherwise r = 1.
      variance: variance of the initial W, times the width. The paper takes 2, and 0.25 for residual networks.
    """

    equation: str
    skip: bool = True
    norm: str = ""
    weighted: bool = False
    variance: float = 2.0


METHODS = {
    "vanilla": Method("x' = F(x)", skip=False),
    "residual": Method("x' = x + F(x)", variance=0.25),
    "norm": Method("x' = LN(F(x))", skip=False, norm="after"),
    "pre_norm": Method("x' = x + F(LN(x))", norm="before"),
    "post_norm": Method("x' = LN(x + F(x))", norm="after"),
    "rezero": Method("x' = x + r F(x)", weighted=True),
}

OPTIMIZERS = {
    # The constants are those of PyTorch. With r = 0, the gradient of W is 0 in the first update, and W stays as it is.
    "adagrad": functools.partial(optax.adagrad, initial_accumulator_value=0.0, eps=1e-10),
    "sgd": optax.sgd,
}

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Quantiles of the singular values in a row of the table, by epoch."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    method: str = field(default="rezero", metadata={"choices": (*METHODS,)})
    depth: int = 32
    width: int = 256
    learning_rate: float = 0.01
    optimizer: str = field(default="adagrad", metadata={"choices": (*OPTIMIZERS,)})
    remat: str = field(default="nested", metadata={"choices": REMAT})
    batch: int = 100
    epochs: int = 20
    seed: int = 0


def init(method: Method, depth: int, width: int, inputs: int, key: jax.Array) -> Params:
    """Returns the initial parameters. The leaves of `layers` are [L, ...]; the first layers do not depend on L."""
    embed, layers, output = jax.random.split(key, 3)

    def normal(key: jax.Array, shape: tuple[int, int], variance: float) -> jax.Array:
        return (variance / shape[0]) ** 0.5 * jax.random.normal(key, shape)

    def kernel(index: jax.Array) -> jax.Array:
        return normal(jax.random.fold_in(layers, index), (width, width), method.variance)

    stack = {"kernel": jax.lax.map(kernel, jnp.arange(depth))}
    if method.weighted:
        stack["weight"] = jnp.zeros(depth)
    if method.norm:
        stack |= {"scale": jnp.ones((depth, width)), "bias": jnp.zeros((depth, width))}
    return {
        "embed": normal(embed, (inputs, width), 1.0),
        "layers": stack,
        "output": normal(output, (width, CLASSES), 1.0),
    }


def layer(method: Method, x: jax.Array, p: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
    """x' = P(s x + r relu(W Q(x))), [B, D] -> [B, D]; the second value is the output that `run_stack` stacks."""

    def normalise(place: str, x: jax.Array) -> jax.Array:
        return layer_norm(x, p["scale"], p["bias"]) if method.norm == place else x

    branch = jax.nn.relu(normalise("before", x) @ p["kernel"])
    if method.weighted:
        branch = p["weight"] * branch
    return normalise("after", x + branch if method.skip else branch), None


def transform(method: Method, layers: Params, x: jax.Array, remat: str = "none") -> jax.Array:
    """x_0 -> x_L, [B, D] -> [B, D]."""
    return run_stack(functools.partial(layer, method), x, layers, remat=remat)[0]


def logits(method: Method, params: Params, images: jax.Array | np.ndarray, remat: str = "none") -> jax.Array:
    """[B, ...] images -> [B, 10] logits."""
    x = images.reshape(len(images), -1) @ params["embed"]
    return transform(method, params["layers"], x, remat) @ params["output"]


def loss(method: Method, params: Params, batch: Split, remat: str = "none") -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross-entropy, and [mean cross-entropy, accuracy]."""
    scores = logits(method, params, batch.images, remat)
    mean = optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels).mean()
    return mean, jnp.stack([mean, (scores.argmax(-1) == batch.labels).mean()])


def singular_values(method: Method, params: Params, image: jax.Array) -> jax.Array:
    """Returns the singular values [D] of dx_L / dx_0 at one image, in descending order."""
    x = image.ravel() @ params["embed"]
    jacobian = jax.jacfwd(lambda x: transform(method, params["layers"], x[None])[0])(x)
    return jnp.linalg.svd(jacobian, compute_uv=False)


def make_update(run: Run, inputs: int) -> tuple[Callable[[jax.Array], State], Callable[..., tuple[State, jax.Array]]]:
    """Returns two functions: key -> initial state, and (state, batch) -> new state, [mean loss, accuracy].

    Args:
      run: the network and the optimiser.
      inputs: numbers per image.
    """
    method, optimizer = METHODS[run.method], OPTIMIZERS[run.optimizer](run.learning_rate)

    def initial(key: jax.Array) -> State:
        params = init(method, run.depth, run.width, inputs, key)
        return params, optimizer.init(params)

    def update(state: State, batch: Split) -> tuple[State, jax.Array]:
        params, moments = state
        gradient, figure = jax.grad(loss, argnums=1, has_aux=True)(method, params, batch, run.remat)
        change, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, change), moments), figure

    return initial, update


def train(run: Run, images: Images) -> runs.Row:
    """Trains one network.

    Returns:
      The columns of `runs.summary`; `test_accuracy`; `singular_values`, their `QUANTILES` before training and after
      each epoch, at the first test image; `peak_bytes`, the memory of an update as the compiler reports it.
    """
    method = METHODS[run.method]
    initial, update = make_update(run, images.train.images[0].size)

    @jax.jit
    def quantiles(params: Params) -> jax.Array:
        return jnp.quantile(singular_values(method, params, images.test.images[0]), jnp.array(QUANTILES))

    state = jax.jit(initial)(jax.random.key(run.seed))
    example = Split(*(array[: run.batch] for array in images.train))
    program: Any = jax.jit(update, donate_argnums=0).lower(state, example).compile()
    values, losses, accuracies = [quantiles(state[0]).tolist()], [], []
    for epoch in runs.fit(program, state, images.train, epochs=run.epochs, batch=run.batch, seed=run.seed):
        state = epoch.state
        values.append(quantiles(state[0]).tolist())
        losses.append(epoch.loss)
        accuracies.append(epoch.accuracy)
    test = jax.jit(functools.partial(loss, method))(state[0], images.test)[1]
    return runs.summary(losses, accuracies) | {
        "test_accuracy": round(float(test[1]), 4),
        "singular_values": [[float(f"{v:.4g}") if np.isfinite(v) else None for v in epoch] for epoch in values],
        "peak_bytes": int(allocated_bytes(program)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    draw = functools.partial(mlp_figures.draw, methods=[*METHODS])
    runs.command(Run, __doc__, "runs/deep_mlp.jsonl", train, draw, argv)


if __name__ == "__main__":
    main()
