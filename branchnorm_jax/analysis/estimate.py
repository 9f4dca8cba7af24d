"""Cost of an update: operations, memory and time, predicted from formulas and the traced program, or measured."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from branchnorm_jax.analysis import costs, devices
from branchnorm_jax.analysis.rules import RULES, Parts
from branchnorm_jax.axes import MESH, partition
from branchnorm_jax.data.packing import row_lengths
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.stack import REMAT, size_of
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.parallel.mesh import local_mesh
from branchnorm_jax.tokens import UNK
from branchnorm_jax.training.lower import allocated_bytes
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, first_state
from branchnorm_jax.training.step import make_train_step

SHARES = {"gpu": (0.7, 1.0), "tpu": (0.6, 0.8), "cpu": (0.6, 0.8)}
"""Platform -> fractions of the peak FLOP/s (for matrix products of width 512 and above) and of the bandwidth.

Those of GPUs are fitted to four updates measured on an H200, from 6L-6L to 500L-500L: the estimates are within 3 % of
them (docs/performance.md). The second fraction also makes up for traffic that is estimated but does not occur, because
XLA keeps values of neighbouring operations in registers. The others are assumed.
"""

UNROLLED, GROUP = 24, 5
"""Largest depth of stacks that are not a loop, and the size of the groups that `full` recomputes. Larger stacks
compile for many minutes; groups of 10 are only 0.3 % faster than groups of 5 (`benchmarks/compiled.py`)."""

SHALLOW, SHARE = (1, 4), 5
"""Depths timed by `calibrate`: SHALLOW[0], and the larger of SHALLOW[1] and the depth of the run divided by SHARE."""


def forward_flops(config: Config, source_length: float, target_length: float, vocabulary: int) -> dict[str, float]:
    """Returns the FLOPs of a forward pass per source-target token pair (per token without an encoder), by part.

    Counts matrix products and attention scores, with 2 operations per multiply-add. Norms, softmax and embeddings are
    not counted. A query attends to all source tokens and, on average, to half of the target tokens.

    Args:
      config: the run.
      source_length: average length of a source sentence in tokens.
      target_length: average length of a target sentence in tokens.
      vocabulary: size of the target vocabulary.
    """
    m = config.model
    d, f, a = m.width, m.ffn_width, m.heads * m.key_width
    feed_forward = (6 if m.gated else 4) * d * f
    projections, scores = 8 * d * a, 4 * a
    own = projections + feed_forward + scores * target_length / 2
    if m.family == "decoder":
        return {"decoder": m.decoder_layers * own, "output": 2 * d * vocabulary}
    return {
        "encoder": m.encoder_layers * (projections + feed_forward + scores * source_length),
        "decoder": m.decoder_layers * (own + projections + scores * source_length),
        "output": 2 * d * vocabulary,
    }


def recomputed_flops(config: Config, forward: dict[str, float], source_length: float, target_length: float) -> float:
    """Returns the FLOPs recomputed per pair of tokens; see the table of `run_stack`."""
    m = config.model
    if m.remat == "save_branches":
        hidden = (4 if m.gated else 2) * m.width * m.ffn_width
        scores = 2 * m.heads * m.key_width
        encoder = m.encoder_layers * (hidden + scores * source_length)
        attended = target_length / 2 + (source_length if m.encoder_layers else 0)
        return encoder + m.decoder_layers * (hidden + scores * attended)
    return {"none": 0, "full": 1, "nested": 2}[m.remat] * sum(forward[stack] for stack in m.stacks)


def with_remat(config: Config, remat: str) -> Config:
    """Returns the config with another `model.remat`, and with the loops that suit it on the device.

    On GPUs and TPUs, a loop copies what it stores to stacked arrays and back, which takes longer than computing it
    again. So shallow stacks that store their activations are not loops, and `full` recomputes groups of layers that are
    not loops. `model.unroll` and `model.group` are only chosen where they are 0.
    """
    model = config.model
    depths, changed = model.layers, dict[str, Any](remat=remat)
    if unrolls(config):
        if remat in ("none", "save_branches") and not model.unroll and max(depths) <= UNROLLED:
            changed["unroll"] = max(depths)
        if remat == "full" and not model.group:
            # A group of all layers would keep what `none` keeps.
            divisors = [g for g in range(1, max(depths) // 2 + 1) if math.gcd(*depths) % g == 0]
            changed["group"] = min(divisors, key=lambda g: abs(g - GROUP), default=1)
    return dataclasses.replace(config, model=dataclasses.replace(model, **changed))


def unrolls(config: Config) -> bool:
    """Returns whether layers outside of loops pay on the device.

    With fsdp they do not: a loop holds the matrices of one layer, made whole, at a time.
    """
    return devices.platform(config.plan.device) != "cpu" and config.parallel.fsdp == 1


def remat_choices(config: Config) -> tuple[str, ...]:
    """Returns the values of `REMAT` that the run supports."""
    return ("full", "nested") if config.train.update_in_backward else REMAT


def remat_order(config: Config) -> list[Config]:
    """Returns the choices of `remat=auto`, from the fastest to the one that needs the least memory."""
    choices = [with_remat(config, remat) for remat in remat_choices(config)]
    if not unrolls(config):
        return choices
    deepest = max(config.model.layers)
    return [c for c in choices if c.model.remat in ("full", "nested") or c.model.unroll >= deepest]


def shrink(config: Config, encoder_layers: int, decoder_layers: int) -> Config:
    """Returns the config with fewer layers."""
    changed = dataclasses.replace(config.model, encoder_layers=encoder_layers, decoder_layers=decoder_layers, group=0)
    return dataclasses.replace(config, model=changed)


def update(config: Config, rows: int, length: int) -> tuple[Any, TrainState, Batch]:
    """Returns the update function of one device of the run and the shapes of its arguments.

    The batch has `rows` x `length` tokens. The function uses the kernels of the mesh that `jax.set_mesh` has set; none
    if the run has several devices (see `axes.kernels`), or rows of any length, which rarely suit them.
    """
    chosen = config.data.power_of_two_rows or config.data.source == "documents"
    if (config.plan.devices or jax.device_count()) > 1 or not chosen:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, kernels="plain"))
    model = Transformer(config.model, config.data.vocab_size, config.data.vocab_size)
    optimizer = make_optimizer(config.train, config.model)
    params = model.abstract_params()
    state = jax.eval_shape(lambda params: first_state(params, optimizer, bool(config.train.ema_decay)), params)
    tokens: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return make_train_step(model, optimizer, config), state, Batch(tokens, tokens)


def absent_mesh(name: str) -> AbstractMesh:
    """Returns the mesh of one device with this name ("": a local one); kernels and types depend on its platform."""
    kind = name.upper() if name else jax.local_devices()[0].device_kind
    device = AbstractDevice(kind, None, devices.platform(name))
    return AbstractMesh((1,) * len(MESH), MESH, abstract_device=device)


@functools.lru_cache
def update_costs(config: Config, rows: int, length: int) -> costs.Costs:
    """Estimates the costs of an update on one device; the peak includes its inputs."""
    step, state, batch = update(config, rows, length)
    rules = RULES[devices.platform(config.plan.device)]._replace(parts=parts(config, state.params))
    with jax.sharding.use_abstract_mesh(absent_mesh(config.plan.device)):
        estimate = costs.trace(step, state, batch, donated=[0], rules=rules)
    in_backward, split = config.train.update_in_backward, config.parallel.model
    gradients, held = (0.0, 0.0) if in_backward else (size_of(state.params), rules.held * size_of(state.params))
    share, gathered = stored(config, state.params)
    activations = max(0.0, estimate.peak - share * (size_of(state) + gradients))
    peak = share * (size_of(state) + gradients + held) + gathered + activations + size_of(batch)
    if rules.norms_first and config.model.remat == "nested" and config.parallel.fsdp > 1:
        peak = max(peak, share * (size_of(state) + 2 * gradients))
    return costs.Costs(estimate.flops / split, estimate.traffic / split, peak)


def shards(config: Config, params: Params) -> Any:
    """Returns the number of devices that share each parameter, as a tree like `params`."""
    model = Transformer(config.model, config.data.vocab_size, config.data.vocab_size)
    sizes = {axis: getattr(config.parallel, axis) or 1 for axis in MESH}

    def of(leaf: Any, names: tuple[str, ...]) -> int:
        return math.prod(sizes[axis] for axis in partition(leaf.shape, names, sizes) if axis)

    return jax.tree.map(of, params, model.logical_axes())


def parts(config: Config, params: Params) -> Parts:
    """Returns a function from the shape of a value of the update to the number of devices that share it.

    Stacks of matrices (parameters, moments, gradients and steps) and tables are split like their parameters. The matrix
    of a single layer is whole along fsdp, because the layer gathers it. The mesh axis `model` splits hidden units,
    logits, scores and heads. All other values are whole, such as the residual stream.
    """
    leaves, numbers = jax.tree.leaves(params), jax.tree.leaves(shards(config, params))
    split = {leaf.shape[-2:]: number for leaf, number in zip(leaves, numbers, strict=True)}
    depths = config.model.layers
    tables = [leaf.shape for leaf in jax.tree.leaves(params["embedding"])]
    model, widths = config.model, (config.model.ffn_width, config.data.vocab_size)

    def of(shape: tuple[int, ...]) -> int:
        # The layers of a stack, or of a group of layers.
        layers = len(shape) > 2 and any(depth % math.prod(shape[:-2]) == 0 for depth in depths)
        if shape[-2:] in split and (layers or shape in tables):
            return split[shape[-2:]]
        by_model = (len(shape) > 0 and shape[-1] in widths) or (len(shape) > 3 and model.heads in shape[-3:-1])
        return config.parallel.model if by_model else 1

    return of


def stored(config: Config, params: Params) -> tuple[float, float]:
    """Returns how the mesh stores parameters.

    Returns:
      The share of the parameters, gradients and moments that each device stores; with fsdp, the bytes of the embedding
      tables and their gradients, which are whole at the same time, and 0 without it.
    """
    numbers = shards(config, params)
    bytes_of_each = jax.tree.map(lambda leaf, number: size_of(leaf) / number, params, numbers)
    fsdp = config.parallel.fsdp
    tables = sum(jax.tree.leaves(bytes_of_each["embedding"])) if fsdp > 1 else 0
    return sum(jax.tree.leaves(bytes_of_each)) / size_of(params), 2 * fsdp * tables


def rows_of(config: Config, length: int, count: int) -> int:
    """Returns the rows of `length` per update on each of `count` devices."""
    multiple, parts = config.data.row_multiple, config.train.accumulation
    rows = max(multiple, config.train.batch_tokens // length // multiple * multiple)
    return math.ceil(rows / count / parts) * parts


def sentence_length(config: Config) -> float:
    """Returns the assumed number of tokens that attend to each other: a sentence, or a row of a language model."""
    if config.data.source == "documents":
        return config.data.context
    return min(config.plan.sentence_length, config.data.max_length)


def lengths(config: Config) -> tuple[int, ...]:
    """Returns the shortest and the longest row length; one of the two needs the most memory."""
    if config.data.source == "documents":
        return (config.data.context,)
    tokens, multiple, longest = config.train.batch_tokens, config.data.row_multiple, config.data.max_length
    ladder = row_lengths(sentence_length(config), longest, tokens, multiple, config.data.power_of_two_rows)
    ladder = ladder[-config.data.batch_shapes :]
    return tuple(sorted({ladder[0], ladder[-1]}))


def peak_bytes(config: Config, count: int) -> float:
    """Returns the peak memory in bytes of an update on each of `count` devices."""
    return max(update_costs(config, rows_of(config, length, count), length).peak for length in lengths(config))


def held_bytes(config: Config) -> float:
    """Returns the bytes of parameters, optimiser state, moving average and gradients on each device.

    No choice of `model.remat` and no smaller batch reduces them.
    """
    _, state, _ = update(with_remat(config, remat_choices(config)[-1]), 1, 1)
    gradients = 0 if config.train.update_in_backward else size_of(state.params)
    return stored(config, state.params)[0] * (size_of(state) + gradients)


def compiled_update_bytes(config: Config, rows: int, length: int) -> float:
    """Returns the memory of `update` in bytes, as reported by the local compiler.

    Nothing is run.
    """
    step, state, batch = update(config, rows, length)
    with jax.set_mesh(local_mesh()):
        return allocated_bytes(jax.jit(step, donate_argnums=0).lower(state, batch).compile())


def compiled_bytes(config: Config) -> float:
    """Returns `peak_bytes` as reported by the compiler of the local device."""
    count = data_devices(config)
    return max(compiled_update_bytes(config, rows_of(config, length, count), length) for length in lengths(config))


def seconds(config: Config, device: devices.Device, estimate: costs.Costs) -> float:
    """Estimates a time in seconds: the time of the computation plus the time of the memory traffic."""
    of_matrix, of_bandwidth = SHARES[devices.platform(config.plan.device)]
    matrix = device.matrix if config.model.dtype == "bfloat16" else device.matrix_float32
    return estimate.flops / (of_matrix * matrix) + estimate.traffic / (of_bandwidth * device.bandwidth)


def fitting_tokens(config: Config, memory: float) -> int:
    """Returns the largest microbatch that fits, in positions per side.

    The result is 0 if not even one row fits. The peak is a convex function of the number of rows (a maximum of linear
    functions). The chord between a number that fits and one that does not therefore reaches `memory` at a number that
    fits.
    """
    length, parts = lengths(config)[0], config.train.accumulation

    def peak(rows: int) -> float:
        return update_costs(config, rows * parts, length).peak

    fits, many = 1, 16
    if peak(fits) > memory:
        return 0
    while peak(many) <= memory:
        fits, many = many, 16 * many
    for _ in range(4):
        slope = (peak(many) - peak(fits)) / (many - fits)
        guess = min(many - 1, int(fits + (memory - peak(fits)) / slope))
        if guess == fits:
            break
        fits, many = (guess, many) if peak(guess) <= memory else (fits, guess)
    return fits * length


def data_devices(config: Config) -> int:
    """Returns the number of data-parallel devices.

    Raises:
      UserError: if `parallel.model` does not divide the number of devices.
    """
    devices = config.plan.devices or jax.device_count()
    if devices % config.parallel.model:
        raise UserError(
            f"config: parallel.model={config.parallel.model} does not divide {devices} devices; choose a divisor"
        )
    return devices // config.parallel.model


def calibrate(config: Config) -> Callable[[float], float]:
    """Returns a function from the estimate of `seconds` to the local device's time.

    The function is linear. It is fitted to the measured times of two shallow models, which have the width and the
    batches of the run, and extrapolates them in depth.
    """
    remat = "none" if config.model.remat == "auto" else config.model.remat
    device, length = devices.find(""), lengths(config)[0]
    rows = rows_of(config, length, data_devices(config))
    points, deepest = {}, max(config.model.layers)
    for layers in (SHALLOW[0], max(SHALLOW[1], -(-deepest // SHARE))):
        depth = (min(layers, config.model.encoder_layers), min(layers, config.model.decoder_layers))
        shallow = with_remat(shrink(config, *depth), remat)
        points[seconds(shallow, device, update_costs(shallow, rows, length))] = measured_seconds(shallow, rows, length)
    (low, at_low), (high, at_high) = min(points.items()), max(points.items())
    slope = (at_high - at_low) / (high - low) if high > low else at_low / low
    return lambda predicted: at_low + slope * (predicted - low)


def measured_seconds(config: Config, rows: int, length: int, repetitions: int = 5) -> float:
    """Measures the median time of an update on random tokens, in seconds.

    The first update, which includes compilation, is not counted.
    """
    step, _, _ = update(config, rows, length)
    model = Transformer(config.model, config.data.vocab_size, config.data.vocab_size)
    optimizer = make_optimizer(config.train, config.model)
    tokens = jax.random.randint(jax.random.key(0), (2, rows, length), UNK + 1, config.data.vocab_size)

    def start() -> TrainState:
        return first_state(model.init(jax.random.key(0)), optimizer, bool(config.train.ema_decay))

    state, run = jax.jit(start)(), jax.jit(step, donate_argnums=0)
    times = []
    with jax.set_mesh(local_mesh()):
        for _ in range(repetitions + 1):
            begin = time.perf_counter()
            state, metrics = run(state, Batch(*tokens))
            jax.block_until_ready(metrics)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
