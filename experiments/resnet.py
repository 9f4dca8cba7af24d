r"""ResNets of 6 n + 2 layers on CIFAR-10 (*ReZero is All You Need*, Section 6).

    python -m experiments.resnet --data=tfds --depth=20,56 --method=batch_norm,fixup,rezero,rezero_batch_norm

This command, the setting of the paper, needs an accelerator and has not been run. On one CPU core (AMD EPYC), two
epochs of 2,000 images with --depth=20 --width=8 take 21 to 28 seconds, including compilation.

The network is the one of *Deep Residual Learning for Image Recognition* (He et al., 2016) for CIFAR-10: a convolution,
three stages of n blocks with 1, 2 and 4 times the width and 1, 1/2 and 1/4 of the resolution, the mean over all
positions, and a linear layer. A block computes x' = relu(S(x) + F(x)), where F has two 3 x 3 convolutions. S is the
identity; at the start of a stage it takes every second pixel and pads the new channels with zeros, so it has no
parameters. The methods differ in F; see `METHODS`.

The results are one line of JSON per run, in runs/resnet.jsonl, and a figure of loss and accuracies by epoch. A second
call with the same flags only draws the figure.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.analysis import figures
from branchnorm_jax.errors import UserError
from branchnorm_jax.training.lower import allocated_bytes
from experiments import runs
from experiments.cifar import CLASSES, Images, Split

STAGES = (1, 2, 4)
"""Width of each stage, relative to the first one."""


class Method(NamedTuple):
    """The branch of a block.

    Attributes:
      equation: F(x), where C1 and C2 are convolutions without biases.
      norm: whether a BatchNorm follows each convolution.
      weighted: whether the branch has a learned scalar r that starts at 0.
      fixup: whether a learned scalar is added before each convolution and activation, and C2 and the last layer start
        at 0 (*Fixup Initialization*, Zhang et al., 2019).
    """

    equation: str
    norm: bool = False
    weighted: bool = False
    fixup: bool = False


METHODS = {
    "batch_norm": Method("BN(C2(relu(BN(C1(x)))))", norm=True),
    "fixup": Method("m C2(relu(C1(x + b1) + b2) + b3) + b4", fixup=True),
    "rezero": Method("r C2(relu(C1(x)))", weighted=True),
    "rezero_batch_norm": Method("r BN(C2(relu(BN(C1(x)))))", norm=True, weighted=True),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    method: str = field(default="rezero", metadata={"choices": (*METHODS,)})
    depth: int = 20
    width: int = 16
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    batch: int = 128
    epochs: int = 200
    seed: int = 0


class ResNet(nn.Module):
    """[B, 32, 32, 3] images -> [B, 10] logits."""

    method: Method
    blocks: int
    """n, the number of blocks of each of the three stages."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        """Computes the logits; in training, updates the running statistics in `batch_stats`."""
        norm = functools.partial(nn.BatchNorm, use_running_average=not training, momentum=0.9)
        x = convolution(self.width)(x)
        x = nn.relu(norm()(x) if self.method.norm else x + Scalar()() if self.method.fixup else x)
        for stage, times in enumerate(STAGES):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                x = Block(self.method, self.width * times, stride, len(STAGES) * self.blocks)(x, training)
        x = x.mean((1, 2))
        if self.method.fixup:
            return nn.Dense(CLASSES, kernel_init=nn.initializers.zeros)(x + Scalar()())
        return nn.Dense(CLASSES)(x)


class Block(nn.Module):
    """x' = relu(S(x) + F(x)), [B, H, W, C] -> [B, H / stride, W / stride, width]."""

    method: Method
    width: int
    stride: int
    total: int
    """Number of blocks of the network."""

    @nn.compact
    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        """Applies the block."""
        norm = functools.partial(nn.BatchNorm, use_running_average=not training, momentum=0.9)
        method = self.method
        # Fixup divides the standard deviation of C1 by sqrt(number of blocks): by L^(1 / (2 m - 2)) with m = 2.
        first = convolution(self.width, self.stride, 2 / self.total if method.fixup else 2.0)
        second = convolution(self.width, gain=0.0 if method.fixup else 2.0)
        if method.fixup:
            branch = first(x + Scalar()())
            branch = second(nn.relu(branch + Scalar()()) + Scalar()())
            branch = Scalar(1.0)() * branch + Scalar()()
        elif method.norm:
            branch = nn.relu(norm()(first(x)))
            branch = norm()(second(branch))
        else:
            branch = second(nn.relu(first(x)))
        if method.weighted:
            branch = Scalar()() * branch
        return nn.relu(shortcut(x, self.width, self.stride) + branch)


class Scalar(nn.Module):
    """A learned scalar: a bias, multiplier or residual weight."""

    start: float = 0.0

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the scalar."""
        return self.param("value", nn.initializers.constant(self.start), ())


def convolution(width: int, stride: int = 1, gain: float = 2.0) -> nn.Conv:
    """A 3 x 3 convolution without biases; the variance of the weights is gain / fan_out (He et al., 2015)."""
    start = nn.initializers.variance_scaling(gain, "fan_out", "normal") if gain else nn.initializers.zeros
    return nn.Conv(width, (3, 3), stride, padding=1, use_bias=False, kernel_init=start)


def shortcut(x: jax.Array, width: int, stride: int) -> jax.Array:
    """S(x): every `stride`-th pixel, and zeros as the additional channels, half of them on each side."""
    new = width - x.shape[-1]
    return jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (new // 2, new - new // 2)))


def network(run: Run) -> ResNet:
    """Returns the network of a run.

    Raises:
      UserError: if the depth is not 6 n + 2.
    """
    blocks, rest = divmod(run.depth - 2, 2 * len(STAGES))
    if rest or blocks < 1:
        raise UserError(f"--depth={run.depth}: give 6 n + 2 layers, such as 20, 56 or 110")
    return ResNet(METHODS[run.method], blocks, run.width)


def make_optimizer(run: Run, updates: int) -> optax.GradientTransformation:
    """SGD with momentum; the learning rate falls to a tenth after 1/2 and 3/4 of the updates, as in He et al. (2016).

    Weight decay applies to the kernels only. Learned scalars get a tenth of the learning rate, as in Fixup's paper.
    """
    rate = optax.piecewise_constant_schedule(run.learning_rate, {updates // 2: 0.1, updates * 3 // 4: 0.1})

    def scalars(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim == 0, params)

    return optax.chain(
        optax.add_decayed_weights(run.weight_decay, lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
        optax.masked(optax.scale(0.1), scalars),
        optax.sgd(rate, run.momentum),
    )


def train(run: Run, images: Images) -> runs.Row:
    """Trains one network.

    Returns:
      The columns of `runs.summary`; `test_accuracy` after the last epoch, and `valid_accuracy` after each epoch, both
      on the test images; `parameters`, their number; `peak_bytes`, the memory of an update
      as the compiler reports it.
    """
    model = network(run)
    optimizer = make_optimizer(run, run.epochs * (len(images.train.labels) // run.batch))

    @jax.jit
    def initial(key: jax.Array) -> tuple[Any, Any]:
        variables = model.init(key, images.train.images[:1], training=False)
        return variables, optimizer.init(variables["params"])

    def update(state: tuple[Any, Any], batch: Split) -> tuple[tuple[Any, Any], jax.Array]:
        variables, moments = state
        params = variables["params"]

        def loss(params: Any) -> tuple[jax.Array, Any]:
            scores, changed = model.apply(
                {**variables, "params": params}, batch.images, training=True, mutable=["batch_stats"]
            )
            mean = optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels).mean()
            return mean, (changed, jnp.stack([mean, (scores.argmax(-1) == batch.labels).mean()]))

        gradient, (changed, figure) = jax.grad(loss, has_aux=True)(params)
        change, moments = optimizer.update(gradient, moments, params)
        return ({**changed, "params": optax.apply_updates(params, change)}, moments), figure

    @jax.jit
    def accuracy(variables: Any) -> jax.Array:
        scores: Any = model.apply(variables, images.test.images, training=False)
        return (scores.argmax(-1) == images.test.labels).mean()

    state = initial(jax.random.key(run.seed))
    example = Split(*(array[: run.batch] for array in images.train))
    program: Any = jax.jit(update, donate_argnums=0).lower(state, example).compile()
    losses, accuracies, valid = [], [], []
    options: dict[str, Any] = dict(epochs=run.epochs, batch=run.batch, seed=run.seed, augmented=True)
    for epoch in runs.fit(program, state, images.train, **options):
        losses.append(epoch.loss)
        accuracies.append(epoch.accuracy)
        valid.append(round(float(accuracy(epoch.state[0])), 4))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(epoch.state[0]["params"]))
    return runs.summary(losses, accuracies) | {
        "test_accuracy": valid[-1],
        "valid_accuracy": valid,
        "parameters": parameters,
        "peak_bytes": int(allocated_bytes(program)),
    }


def draw(rows: Sequence[runs.Row], path: Path) -> None:
    """Draws training loss, training accuracy and validation accuracy by epoch, one row per depth."""
    pyplot = figures.pyplot()
    depths = sorted({row["depth"] for row in rows})
    columns = {"train_loss": "training loss", "train_accuracy": "training accuracy", "valid_accuracy": "test accuracy"}
    figure, axes = pyplot.subplots(
        len(depths), len(columns), figsize=(12, 3.2 * len(depths)), squeeze=False, layout="constrained"
    )
    options = [option.name for option in fields(Run) if option.name not in ("method", "depth")]
    varied = [name for name in options if len({row[name] for row in rows}) > 1]
    labels = [", ".join([row["method"], *(f"{name}={row[name]}" for name in varied)]) for row in rows]
    styles = {label: figures.line(number) | {"linewidth": 1.5} for number, label in enumerate(dict.fromkeys(labels))}
    for row, label in zip(rows, labels, strict=True):
        for axis, (name, title) in zip(axes[depths.index(row["depth"])], columns.items(), strict=True):
            axis.plot(range(1, len(row[name]) + 1), row[name], **styles[label], label=label)
            axis.set(title=f"{title}, {row['depth']} layers", xlabel="epoch")
    runs.save_figure(figure, axes[0, 0], path.with_name(f"{path.name}.png"))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    runs.command(Run, __doc__, "runs/resnet.jsonl", train, draw, argv)


if __name__ == "__main__":
    main()
