"""One update and one validation batch, as pure functions of state and batch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.model.losses import Blocks, LossSums, smoothed_cross_entropy
from branchnorm_jax.model.parameters import STACKS, Params, norm_by_layer
from branchnorm_jax.model.places import decoder_inputs
from branchnorm_jax.model.stack import LayerUpdate, depth_of
from branchnorm_jax.model.transformer import BranchScale, Transformer
from branchnorm_jax.options import PAD, Config
from branchnorm_jax.parallel.mesh import data_size
from branchnorm_jax.training import schedules
from branchnorm_jax.training.optimizer import moments_of, with_moments
from branchnorm_jax.training.state import DROPOUT_STREAM, Batch, TrainState
from branchnorm_jax.training.watch import deviations, layer_statistics, remember

Norms = dict[str, jax.Array]
"""See `norms`."""


class Metrics(NamedTuple):
    """What one update reports: float32 [] each, means per target token in nats."""

    loss: jax.Array
    nll: jax.Array
    learning_rate: jax.Array
    alpha: jax.Array
    """The mean over all layers, where they differ."""
    grad_norm: jax.Array
    update_norm: jax.Array
    """Of what is subtracted from the parameters."""
    loss_deviations: jax.Array
    """How many standard deviations loss and update are above what is usual: see `watch.deviations`."""
    update_deviations: jax.Array
    target_tokens: jax.Array
    layers: dict[str, dict[str, jax.Array]] = {}  # noqa: RUF012
    """By stack and statistic, float32 [L], if `train.watch_every` asks for it.

    See `watch.layer_statistics`.
    """


def loss_sums(
    model: Transformer,
    params: Params,
    batch: Batch,
    branch_scale: BranchScale,
    smoothing: float,
    key: jax.Array | None = None,
    probes: Mapping[str, jax.Array] | None = None,
    sown: str = "",
    shards: int = 1,
    updates: Mapping[str, LayerUpdate] | None = None,
) -> tuple[LossSums, dict[str, Any]]:
    """Smoothed cross-entropy of a batch under teacher forcing, and what `Transformer.hidden` returns beside.

    `shards` is the number of devices that the rows are split over.
    """
    inputs = decoder_inputs(batch.target)
    x_BTD, by_layer = model.hidden(params, batch.source, inputs, branch_scale, key, probes, sown, updates)
    blocks, real = Blocks(model.config.logits_mb * 2**20, shards), batch.target != PAD
    return smoothed_cross_entropy(x_BTD, model.output(params), batch.target, real, smoothing, blocks), by_layer


class Updated(NamedTuple):
    """What an update makes of the state, and the norms that it came by, as in `norms`."""

    params: Params
    opt_state: optax.OptState
    gradient: Norms
    change: Norms
    """Of what was subtracted from the parameters."""
    before: Norms
    """Of the layers' parameters themselves."""


def make_train_step(
    model: Transformer, optimizer: optax.GradientTransformation, config: Config
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The update: gradient of the mean loss per target token over the whole batch, whatever its parts."""
    train = config.train
    learning_rate, alpha = schedules.learning_rate(train, config.model.width), schedules.alpha(config.model)
    tick = schedules.tick(config.model)
    parts, sown = train.accumulation, "watch" if train.watch_every else ""
    shards = data_size(config.parallel)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        alpha_t, rate = alpha(state.clock), learning_rate(state.step) * state.rate_scale
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(train.seed), DROPOUT_STREAM), state.step)
        tokens = (batch.target != PAD).sum().astype(jnp.float32)
        scale = loss_scale(tokens)

        def part_loss(
            params: Params, part: Batch, part_key: jax.Array, updates: Mapping[str, LayerUpdate] | None = None
        ) -> tuple[jax.Array, Any]:
            sums, by_layer = loss_sums(
                model, params, part, alpha_t, train.label_smoothing, part_key, None, sown, shards, updates
            )
            return sums.loss * (scale / tokens), (sums.nll / tokens, jax.tree.map(lambda x: x / parts, by_layer))

        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(parts))
        if train.update_in_backward:
            of_batch = functools.partial(part_loss, part=batch, part_key=keys[0])
            (loss, (nll, layers)), made = differentiate_and_update(of_batch, scale, optimizer, state, rate)
        else:
            differentiate = jax.value_and_grad(part_loss, has_aux=True)

            def add_part(total: tuple, part: tuple[Batch, jax.Array]) -> tuple[tuple, None]:
                return jax.tree.map(jnp.add, total, differentiate(state.params, *part)), None

            if parts == 1:
                (loss, (nll, layers)), grads = differentiate(state.params, batch, keys[0])
            else:
                # Strided, so that every device that holds a slice of the rows has an equal share of each part.
                split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
                first = jax.tree.map(lambda x: x[0], split)
                zero = jax.tree.map(
                    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate, state.params, first, key)
                )
                ((loss, (nll, layers)), grads), _ = jax.lax.scan(add_part, zero, (split, keys))
            made = update(grads, scale, optimizer, state.opt_state, state.params, rate)
        loss = loss / scale
        grad_norm, update_norm = _total(made.gradient), _total(made.change)
        figures = jnp.stack([loss, jnp.log(update_norm / rate)])
        above = deviations(state.usual, figures)
        good = jnp.bool_(True)
        if train.nonfinite == "skip":
            good &= jnp.isfinite(loss + grad_norm + update_norm)
        if train.spike == "skip":
            good &= ~(above > train.spike_deviations).any()
        ema = None if state.ema is None else moved_average(state.ema, made.params, train.ema_decay, state.step)
        kept = made.params, made.opt_state, ema
        if "skip" in (train.nonfinite, train.spike):
            before = state.params, state.opt_state, state.ema
            kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), kept, before)
        if sown:
            layers = layer_statistics(layers, made.gradient, made.change, made.before, alpha_t)
        mean_alpha = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(alpha_t)]).mean()
        metrics = Metrics(loss, nll, rate, mean_alpha, grad_norm, update_norm, above[0], above[1], tokens, layers)
        clock, held = tick(state.clock, state.held, made.gradient)
        usual = remember(state.usual, figures, train.spike_deviations)
        params, opt_state, ema = kept
        return TrainState(state.step + 1, params, opt_state, state.rate_scale, clock, held, usual, ema), metrics

    return train_step


def moved_average(ema: Params, params: Params, decay: float, step: jax.Array) -> Params:
    """d ema + (1 - d) params with d = min(decay, (1 + t) / (10 + t)), for the parameters that update t = `step` made.

    The average begins with the untrained parameters: as in TensorFlow and Marian, a decay that grows forgets them soon.
    """
    share = jnp.maximum(1 - decay, 9 / (10 + step.astype(jnp.float32)))
    return jax.tree.map(lambda mean, new: mean + share * (new - mean), ema, params)


def loss_scale(tokens: jax.Array) -> jax.Array:
    """The largest power of two that is no more than `tokens`: what the loss is multiplied by, and gradients divided.

    The mean over a batch leaves one token's part in the gradient smaller by their number, and further down the stream
    too small for float16, whose least number is 6e-8: without a scale the encoder of a deep model gets none at all.
    With it gradients have the size of a token's own. Of a power of two no digit is lost on either way.
    """
    return jnp.ldexp(1.0, jnp.frexp(tokens)[1] - 1)


def update(
    scaled: Params,
    scale: jax.Array,
    optimizer: optax.GradientTransformation,
    opt_state: Any,
    params: Params,
    rate: jax.Array,
) -> Updated:
    """p - rate x direction, for all that `params` holds; `scaled` is the gradient times `scale`."""
    grads = jax.tree.map(lambda g: g * (1 / scale), scaled)
    directions, opt_state = optimizer.update(grads, opt_state, params)
    change = jax.tree.map(lambda d: rate * d, directions)
    return Updated(jax.tree.map(jnp.subtract, params, change), opt_state, norms(grads), norms(change), norms(params))


def differentiate_and_update(
    loss: Callable[..., tuple[jax.Array, Any]],
    scale: jax.Array,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    rate: jax.Array,
) -> tuple[tuple[jax.Array, Any], Updated]:
    """`jax.value_and_grad` and `update` in one, layer by layer: see `stack.run_and_update`.

    Args:
      loss: times `scale`, of parameters and, as `updates`, what `Transformer.hidden` takes.
      scale: see `loss_scale`.
      optimizer: one to which every layer is alone.
      state: before the update.
      rate: learning rate.
    """
    moments = {stack: [tree[stack] for tree in moments_of(state.opt_state)] for stack in STACKS}
    figures = {stack: [jnp.zeros(depth_of(state.params[stack]))] * 3 for stack in STACKS}

    def applied(stack: str) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
        def apply(params: Any, gradient: Any, moments: list[Any]) -> tuple[Any, Any, Any]:
            opt_state = with_moments(state.opt_state, [{stack: tree} for tree in moments])
            made = update({stack: gradient}, scale, optimizer, opt_state, {stack: params}, rate)
            after = [tree[stack] for tree in moments_of(made.opt_state)]
            return made.params[stack], after, [found[stack] for found in made[2:]]

        return apply

    def with_updates(params: Params, moments: Any, figures: Any) -> tuple[jax.Array, Any]:
        updates = {stack: LayerUpdate(applied(stack), moments[stack], figures[stack]) for stack in STACKS}
        return loss(params, updates=updates)

    # Of the stacks these are no gradients: parameters, moments and norms after the update.
    value, (after, moments, figures) = jax.value_and_grad(with_updates, argnums=(0, 1, 2), has_aux=True)(
        state.params, moments, figures
    )
    grads, params = ({n: part for n, part in tree.items() if n not in STACKS} for tree in (after, state.params))
    rest = with_moments(
        state.opt_state, [{name: tree[name] for name in params} for tree in moments_of(state.opt_state)]
    )
    made = update(grads, scale, optimizer, rest, params, rate)
    trees = moments_of(made.opt_state)
    whole = [tree | {stack: moments[stack][index] for stack in STACKS} for index, tree in enumerate(trees)]
    of_layers = [{stack: figures[stack][index] for stack in STACKS} for index in range(3)]
    return value, Updated(
        made.params | {stack: after[stack] for stack in STACKS},
        with_moments(made.opt_state, whole),
        *(found | layers for found, layers in zip(made[2:], of_layers, strict=True)),
    )


def norms(tree: Params) -> Norms:
    """Norm of each layer, [L], of the stacks; of everything else, []."""
    return {name: norm_by_layer(part) if name in STACKS else optax.tree.norm(part) for name, part in tree.items()}


def _total(found: Norms) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(norm).sum() for norm in found.values()))


def make_eval_step(model: Transformer, config: Config) -> Callable[[TrainState, Batch], LossSums]:
    """Loss sums of a validation batch, without dropout, of `TrainState.eval_params` at the state's own alpha."""
    alpha = schedules.alpha(config.model)

    def eval_step(state: TrainState, batch: Batch) -> LossSums:
        return loss_sums(model, state.eval_params, batch, alpha(state.clock), config.train.label_smoothing)[0]

    return eval_step
