"""The train step and the validation step, as pure functions of a state and a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.axes import REPLICA, mesh_sizes, row_shards
from branchnorm_jax.model import growth
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.losses import Blocks, LossSums, smoothed_cross_entropy
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.stack import LayerUpdate
from branchnorm_jax.model.taps import Taps
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, TrainConfig
from branchnorm_jax.tokens import PAD
from branchnorm_jax.training import schedules
from branchnorm_jax.training.state import DROPOUT_STREAM, Batch, TrainState
from branchnorm_jax.training.trouble import acceptable, deviations, update_stats
from branchnorm_jax.training.update import (
    Updated,
    differentiate_and_update,
    loss_scale,
    moved_average,
    total_norm,
    update,
)
from branchnorm_jax.training.watch import layer_statistics


class Metrics(NamedTuple):
    """Metrics of one update, float32 [] each. `loss` and `nll` are means per target token in nats."""

    loss: jax.Array
    nll: jax.Array
    learning_rate: jax.Array
    alpha: jax.Array
    """The mean of alpha over all layers."""
    grad_norm: jax.Array
    update_norm: jax.Array
    """Norm of the update, which is subtracted from the parameters."""
    loss_deviations: jax.Array
    """Distance of the loss above its running mean, in standard deviations; see `trouble.deviations`."""
    update_deviations: jax.Array
    """Distance of log(update_norm / learning_rate) above its running mean, in standard deviations."""
    target_tokens: jax.Array
    layers: dict[str, dict[str, jax.Array]] = {}  # noqa: RUF012
    """Layer statistics by stack and name, float32 [L] each; see `watch.layer_statistics`.

    The dict is empty if `train.watch_every` is 0.
    """


def loss_sums(
    model: Transformer,
    params: Params,
    batch: Batch,
    alpha: Alpha,
    smoothing: float,
    key: jax.Array | None = None,
    taps: Taps = Taps(),
) -> tuple[LossSums, dict[str, Any]]:
    """Returns the loss sums of a batch under teacher forcing, and the values that `taps` record in each stack.

    The loss is the smoothed cross-entropy.
    """
    params = model.gather_tables(params)
    x_BTD, by_layer = model.teacher_forced(params, *batch, alpha, key, taps)
    blocks, real = Blocks(model.config.logits_mb * 2**20, row_shards()), batch.target != PAD
    return smoothed_cross_entropy(x_BTD, model.output(params), batch.target, real, smoothing, blocks), by_layer


PartLoss = Callable[..., tuple[jax.Array, Any]]
"""A function (params, part, part_key, updates=None) -> (loss of a part of the batch, (nll, layer statistics))."""


def make_train_step(
    model: Transformer, optimizer: optax.GradientTransformation, config: Config
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the train step, a function (state, batch) -> (state after one update, metrics).

    An update uses the gradient of the mean loss per target token over the whole batch, for any number of parts
    (`train.accumulation`).
    """
    train = config.train
    learning_rate, alpha = schedules.learning_rate(train, config.model.width), growth.alpha(config.model)
    by_layer_rates, tick = schedules.rates(config), schedules.tick(config.model)
    uniform, grows = growth.is_uniform(config.model), get_recipe(config.model.method).grows

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        alpha_t, rate = alpha(state.clock), learning_rate(state.step) * state.rate_scale
        rates = by_layer_rates(state.step, alpha_t, rate)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(train.seed), DROPOUT_STREAM), state.step)
        tokens = (batch.target != PAD).sum().astype(jnp.float32)
        scale = loss_scale(tokens)
        part_loss = make_part_loss(model, config, alpha_t, tokens, scale)
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(train.accumulation))
        if train.update_in_backward:
            of_batch = functools.partial(part_loss, part=batch, part_key=keys[0])
            (loss, (nll, layers)), updated = differentiate_and_update(of_batch, scale, optimizer, state, rate, rates)
        else:
            (loss, (nll, layers)), grads = accumulate_gradient(part_loss, state.params, batch, keys)
            updated = update(grads, scale, optimizer, state.opt_state, state.params, rate, rates)
        loss = loss / scale
        grad_norm, update_norm = total_norm(updated.gradient), total_norm(updated.change)
        values = jnp.stack([loss, jnp.log(update_norm / rate)])
        above = deviations(state.running_stats, values)
        good = acceptable(train, loss, grad_norm, update_norm, above)
        params, opt_state, ema = new_weights(train, state, updated, good)
        if train.watch_every:
            layers = layer_statistics(layers, *updated[2:], state.params, None if uniform else alpha_t)
        metrics = Metrics(
            loss=loss,
            nll=nll,
            learning_rate=rate,
            alpha=mean_over_layers(alpha_t) if grows else jnp.float32(1),
            grad_norm=grad_norm,
            update_norm=update_norm,
            loss_deviations=above[0],
            update_deviations=above[1],
            target_tokens=tokens,
            layers=layers,
        )
        clock, hold_steps = tick(state.clock, state.hold_steps, updated.gradient)
        running_stats = update_stats(state.running_stats, values, train.spike_deviations)
        after = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            clock=clock,
            hold_steps=hold_steps,
            running_stats=running_stats,
            ema=ema,
        )
        return after, metrics

    return train_step


def mean_over_layers(alpha: Alpha) -> jax.Array:
    """Returns the mean of alpha over all layers of the model, float32 [].

    If all layers have the same alpha, the result is exactly this alpha, without rounding errors.
    """
    values = jnp.concatenate(list(alpha.values()))
    return values[0] + (values - values[0]).mean()


def make_part_loss(model: Transformer, config: Config, alpha: Alpha, tokens: jax.Array, scale: jax.Array) -> PartLoss:
    """Returns the loss function of one part of a batch, multiplied by `scale`.

    `tokens` is the number of target tokens in the whole batch. The losses of the parts add up to the loss of the batch.
    """
    train = config.train

    def part_loss(
        params: Params, part: Batch, part_key: jax.Array, updates: Mapping[str, LayerUpdate] | None = None
    ) -> tuple[jax.Array, Any]:
        taps = Taps(record="watch" if train.watch_every else "", updates=updates or {})
        sums, by_layer = loss_sums(model, params, part, alpha, train.label_smoothing, part_key, taps)
        loss, nll = sums.loss * (scale / tokens), sums.nll / tokens
        return loss, (nll, jax.tree.map(lambda x: x / train.accumulation, by_layer))

    return part_loss


def accumulate_gradient(part_loss: PartLoss, params: Params, batch: Batch, keys: jax.Array) -> tuple[Any, Params]:
    """Differentiates the sum of `part_loss` over the parts of the batch, like `jax.value_and_grad`.

    There is one part per key. Each replica of the mesh axis data adds up the gradient of its own rows, so the replicas
    communicate once per update, after the last part. Along fsdp, they do so in each layer; see `axes.gather`.
    """
    replicas = mesh_sizes()["data"]
    if replicas == 1:
        return add_parts(part_loss, params, batch, keys)
    by_replica = jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:]), batch)
    one = functools.partial(add_parts, part_loss)
    of_each = jax.vmap(one, in_axes=(None, 0, None), axis_name=REPLICA, spmd_axis_name="data")
    ((loss, (nll, by_layer)), grads) = of_each(params, by_replica, keys)
    loss, nll, grads = jax.tree.map(lambda parts: parts.sum(0), (loss, nll, grads))
    # The rows are the last axis of the statistics.
    by_layer = jax.tree.map(lambda rows: jnp.moveaxis(rows, 0, -2).reshape(*rows.shape[1:-1], -1), by_layer)
    return (loss, (nll, by_layer)), grads


def add_parts(part_loss: PartLoss, params: Params, batch: Batch, keys: jax.Array) -> tuple[Any, Params]:
    """Adds the losses and gradients of the parts of a batch, one part per key."""
    differentiate = jax.value_and_grad(part_loss, has_aux=True)
    parts = len(keys)
    if parts == 1:
        return differentiate(params, batch, keys[0])

    def add_part(total: tuple, part: tuple[Batch, jax.Array]) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, *part)), None

    # The split is strided, so that every device with a slice of the rows has an equal share of each part.
    split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    first = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), (split, keys))
    shapes = jax.eval_shape(differentiate, params, *first)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add_part, zero, (split, keys))[0]


def new_weights(
    train: TrainConfig, state: TrainState, updated: Updated, good: jax.Array
) -> tuple[Params, optax.OptState, Params | None]:
    """Returns the parameters, the optimiser state and the moving average after the update.

    If an option has the policy "skip" and `good` is False, the function returns the values from before the update.
    """
    ema = None if state.ema is None else moved_average(state.ema, updated.params, train.ema_decay, state.step)
    after = updated.params, updated.opt_state, ema
    if "skip" not in (train.nonfinite, train.spike):
        return after
    before = state.params, state.opt_state, state.ema
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)


def make_eval_step(model: Transformer, config: Config) -> Callable[[TrainState, Batch], LossSums]:
    """Returns a function (state, batch) -> loss sums of a validation batch.

    It uses `TrainState.eval_params` and the alpha of the state, without dropout.
    """
    alpha = growth.alpha(config.model)

    def eval_step(state: TrainState, batch: Batch) -> LossSums:
        return loss_sums(model, state.eval_params, batch, alpha(state.clock), config.train.label_smoothing)[0]

    return eval_step
