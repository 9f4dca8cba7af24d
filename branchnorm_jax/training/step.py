"""One update and one validation batch, as pure functions of state and batch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.model.losses import Blocks, LossSums, smoothed_cross_entropy
from branchnorm_jax.model.parameters import STACKS, Params, norm_by_layer
from branchnorm_jax.model.transformer import Transformer, decoder_inputs
from branchnorm_jax.options import PAD, Config
from branchnorm_jax.parallel.mesh import data_size
from branchnorm_jax.training import schedules
from branchnorm_jax.training.state import DROPOUT_STREAM, Batch, TrainState
from branchnorm_jax.training.watch import layer_statistics


class Metrics(NamedTuple):
    """What one update reports: float32 [] each, means per target token in nats."""

    loss: jax.Array
    nll: jax.Array
    learning_rate: jax.Array
    alpha: jax.Array
    grad_norm: jax.Array
    target_tokens: jax.Array
    layers: dict[str, dict[str, jax.Array]] = {}  # noqa: RUF012
    """By stack and statistic, float32 [L], if `train.watch_every` asks for it.

    See `watch.layer_statistics`.
    """


def loss_sums(
    model: Transformer,
    params: Params,
    batch: Batch,
    branch_scale: jax.Array,
    smoothing: float,
    key: jax.Array | None = None,
    probes: Mapping[str, jax.Array] | None = None,
    sown: str = "",
    shards: int = 1,
) -> tuple[LossSums, dict[str, Any]]:
    """Smoothed cross-entropy of a batch under teacher forcing, and what `Transformer.hidden` returns beside.

    `shards` is the number of devices that the rows are split over.
    """
    inputs = decoder_inputs(batch.target)
    x_BTD, by_layer = model.hidden(params, batch.source, inputs, branch_scale, key, probes, sown)
    blocks, real = Blocks(model.config.logits_mb * 2**20, shards), batch.target != PAD
    return smoothed_cross_entropy(x_BTD, model.output(params), batch.target, real, smoothing, blocks), by_layer


def make_train_step(
    model: Transformer, optimizer: optax.GradientTransformation, config: Config
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The update: gradient of the mean loss per target token over the whole batch, whatever its parts."""
    train = config.train
    learning_rate = schedules.learning_rate(train, config.model.width)
    next_alpha = schedules.next_alpha(config.model)
    parts, sown = train.accumulation, "watch" if train.watch_every else ""
    shards = data_size(config.parallel)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        alpha_t, rate = state.alpha, learning_rate(state.step) * state.rate_scale
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(train.seed), DROPOUT_STREAM), state.step)
        tokens = (batch.target != PAD).sum().astype(jnp.float32)

        def part_loss(params: Params, part: Batch, part_key: jax.Array) -> tuple[jax.Array, Any]:
            sums, by_layer = loss_sums(
                model, params, part, alpha_t, train.label_smoothing, part_key, None, sown, shards
            )
            return sums.loss / tokens, (sums.nll / tokens, jax.tree.map(lambda value: value / parts, by_layer))

        gradient = jax.value_and_grad(part_loss, has_aux=True)

        def add_part(total: tuple, part: tuple[Batch, jax.Array]) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, total, gradient(state.params, *part)), None

        # Strided, so that every device that holds a slice of the rows has an equal share of each part.
        split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(parts))
        if parts == 1:
            (loss, (nll, layers)), grads = gradient(state.params, batch, keys[0])
        else:
            first = jax.tree.map(lambda x: x[0], split)
            zero = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, state.params, first, key)
            )
            ((loss, (nll, layers)), grads), _ = jax.lax.scan(add_part, zero, (split, keys))
        directions, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - rate * d, state.params, directions)
        if train.nonfinite == "skip":
            good = jnp.isfinite(loss + optax.tree.norm(grads))
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(good, new, old), (params, opt_state), (state.params, state.opt_state)
            )
        if sown:
            layers = layer_statistics(layers, grads, directions, state.params, rate)
        metrics = Metrics(loss, nll, rate, alpha_t, optax.tree.norm(grads), tokens, layers)
        gradient_by_layer = {stack: norm_by_layer(grads[stack]) for stack in STACKS}
        alpha, held = next_alpha(state.step + 1, state.alpha, state.alpha_held, gradient_by_layer)
        return TrainState(state.step + 1, params, opt_state, state.rate_scale, alpha, held), metrics

    return train_step


def make_eval_step(model: Transformer, config: Config) -> Callable[[TrainState, Batch], LossSums]:
    """Loss sums of a validation batch, without dropout, at the state's own alpha."""

    def eval_step(state: TrainState, batch: Batch) -> LossSums:
        return loss_sums(model, state.params, batch, state.alpha, config.train.label_smoothing)[0]

    return eval_step
