"""Cost plan of a run: operations, memory, time, and whether it fits the device. Nothing is allocated."""

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.analysis import costs, devices
from branchnorm_jax.data.packing import row_lengths
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.stack import REMAT, best_group, size_of
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.parallel.mesh import data_size
from branchnorm_jax.tokens import UNK
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, first_state
from branchnorm_jax.training.step import make_train_step

MATRIX_SHARE, TRAFFIC_SHARE = 0.6, 0.8
"""Assumed fractions of a device's peak FLOP/s (for matrix products of width 512 and above) and of its bandwidth."""

HELD = 0.8
"""Memory that XLA keeps longer than `costs.peak` assumes, as a multiple of the size of the parameters.

The value is a median over random runs on the CPU. The memory holds gradients and optimiser steps of all layers, so it
is not needed if the update is part of the backward pass.
"""

SHALLOW, SHARE = (1, 4), 5
"""Depths timed by `calibrate`: SHALLOW[0], and the larger of SHALLOW[1] and the depth of the run divided by SHARE."""

PAPER = "BranchNorm's paper: 1000 GPU-days (A100) for 100,000 updates of 524,288 tokens with 500L-500L of width 512"


def forward_flops(config: Config, source_length: float, target_length: float, vocabulary: int) -> dict[str, float]:
    """Returns the FLOPs of a forward pass per source-target token pair, by part.

    Counts matrix products and attention scores, with 2 operations per multiply-add. Norms, softmax and embeddings are
    not counted. A query attends to all source tokens and, on average, to half of the target tokens.

    Args:
      config: the run.
      source_length: average length of a source sentence in tokens.
      target_length: average length of a target sentence in tokens.
      vocabulary: size of the target vocabulary.
    """
    m = config.model
    d, f = m.width, m.ffn_width
    feed_forward = (6 if m.activation == "swiglu" else 4) * d * f
    scores = 4 * d
    return {
        "encoder": m.encoder_layers * (8 * d * d + feed_forward + scores * source_length),
        "decoder": m.decoder_layers * (16 * d * d + feed_forward + scores * (target_length / 2 + source_length)),
        "output": 2 * d * vocabulary,
    }


def recomputed_flops(config: Config, forward: dict[str, float], source_length: float, target_length: float) -> float:
    """Returns the FLOPs recomputed per pair of tokens; see the table of `run_stack`."""
    m = config.model
    if m.remat == "save_branches":
        hidden = (4 if m.activation == "swiglu" else 2) * m.width * m.ffn_width
        scores = 2 * m.width
        encoder = m.encoder_layers * (hidden + scores * source_length)
        return encoder + m.decoder_layers * (hidden + scores * (target_length / 2 + source_length))
    return {"none": 0, "full": 1, "nested": 2}[m.remat] * (forward["encoder"] + forward["decoder"])


def with_remat(config: Config, remat: str) -> Config:
    """Returns the config with another `model.remat`."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def remat_choices(config: Config) -> tuple[str, ...]:
    """Returns the values of `REMAT` that the run supports."""
    return ("full", "nested") if config.train.update_in_backward else REMAT


def shrink(config: Config, encoder_layers: int, decoder_layers: int) -> Config:
    """Returns the config with fewer layers."""
    changed = dataclasses.replace(config.model, encoder_layers=encoder_layers, decoder_layers=decoder_layers, group=0)
    return dataclasses.replace(config, model=changed)


def update(config: Config, rows: int, length: int) -> tuple[Any, TrainState, Batch]:
    """Returns the update function of one device and the shapes of its arguments.

    The batch has `rows` x `length` tokens.
    """
    alone = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, data=1))
    model = Transformer(config.model, config.data.vocab_size, config.data.vocab_size)
    optimizer = make_optimizer(config.train)
    params = model.abstract_params()
    state = jax.eval_shape(lambda params: first_state(params, optimizer, bool(config.train.ema_decay)), params)
    tokens: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return make_train_step(model, optimizer, alone), state, Batch(tokens, tokens)


@functools.lru_cache
def update_costs(config: Config, rows: int, length: int) -> costs.Costs:
    """Estimates the costs of an update on one device; the peak includes its inputs."""
    step, state, batch = update(config, rows, length)
    estimate = costs.trace(step, state, batch, donated=[0])
    held = 0.0 if config.train.update_in_backward else HELD * size_of(state.params)
    split = config.parallel.model
    return costs.Costs(
        estimate.flops / split, estimate.traffic / split, (estimate.peak + held) / split + size_of(batch)
    )


def rows_of(config: Config, length: int, count: int) -> int:
    """Returns the rows of `length` per update on each of `count` devices."""
    multiple, parts = config.data.row_multiple, config.train.accumulation
    rows = max(multiple, config.train.batch_tokens // length // multiple * multiple)
    return math.ceil(rows / count / parts) * parts


def lengths(config: Config) -> tuple[int, ...]:
    """Returns the shortest and longest row length; one of them needs most memory."""
    tokens, multiple, longest = config.train.batch_tokens, config.data.row_multiple, config.data.max_length
    sentence = min(config.plan.sentence_length, longest)
    ladder = row_lengths(sentence, longest, tokens, multiple)[-config.data.batch_shapes :]
    return tuple(sorted({ladder[0], ladder[-1]}))


def peak_bytes(config: Config, count: int) -> float:
    """Returns the peak memory in bytes of an update on each of `count` devices."""
    return max(update_costs(config, rows_of(config, length, count), length).peak for length in lengths(config))


def seconds(config: Config, device: devices.Device, estimate: costs.Costs) -> float:
    """Estimates a time in seconds, as the sum of computation and memory traffic."""
    matrix = device.matrix if config.model.dtype == "bfloat16" else device.matrix_float32
    return estimate.flops / (MATRIX_SHARE * matrix) + estimate.traffic / (TRAFFIC_SHARE * device.bandwidth)


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
    config = with_remat(config, "none") if config.model.remat == "auto" else config
    device, length = devices.find(""), lengths(config)[0]
    rows = rows_of(config, length, data_devices(config))
    points, deepest = {}, max(config.model.encoder_layers, config.model.decoder_layers)
    for layers in (SHALLOW[0], max(SHALLOW[1], -(-deepest // SHARE))):
        depth = (min(layers, config.model.encoder_layers), min(layers, config.model.decoder_layers))
        shallow = shrink(config, *depth)
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
    optimizer = make_optimizer(config.train)
    tokens = jax.random.randint(jax.random.key(0), (2, rows, length), UNK + 1, config.data.vocab_size)

    def start() -> TrainState:
        return first_state(model.init(jax.random.key(0)), optimizer, bool(config.train.ema_decay))

    state, run = jax.jit(start)(), jax.jit(step, donate_argnums=0)
    times = []
    for _ in range(repetitions + 1):
        begin = time.perf_counter()
        state, metrics = run(state, Batch(*tokens))
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def make_plan(config: Config, progress: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Plans a run for each value of `model.remat`; returns the content of `plan.json`.

    Args:
      config: the run.
      progress: called after each of `remat_choices`.

    Raises:
      UserError: if the device is unknown.
    """
    if config.plan.calibrate and config.plan.device:
        raise UserError("config: plan.calibrate measures the local device; leave plan.device empty")
    device, count, length = devices.find(config.plan.device), data_devices(config), lengths(config)[0]
    vocabulary = config.data.vocab_size
    model = Transformer(config.model, vocabulary, vocabulary)
    params = model.abstract_params()
    opt_state = jax.eval_shape(make_optimizer(config.train).init, params)
    ema_bytes = size_of(params) if config.train.ema_decay else 0
    by_part = {name: _count(part) for name, part in params.items()}
    sentence = min(config.plan.sentence_length, config.data.max_length)
    flops = forward_flops(config, sentence, sentence, vocabulary)
    usable, rows = device.memory, rows_of(config, length, count)
    carry = (
        rows // config.train.accumulation * length * config.model.width * jnp.dtype(config.model.carry_dtype).itemsize
    )

    on_device = calibrate(config) if config.plan.calibrate else float

    def with_choice(remat: str) -> dict[str, Any]:
        chosen = with_remat(config, remat)
        step = on_device(seconds(config, device, update_costs(chosen, rows, length)))
        peak = peak_bytes(chosen, count)
        tokens = fitting_tokens(chosen, usable)
        progress()
        return {
            "flops_per_target_token": 3 * sum(flops.values()) + recomputed_flops(chosen, flops, sentence, sentence),
            "peak_bytes": peak,
            "fits": peak <= usable,
            "tokens_per_microbatch": tokens,
            "step_seconds": step,
            "target_tokens_per_second": rows * length * count / step,
            "gpu_days": config.train.steps * step * count * config.parallel.model / 86_400 or None,
        }

    choices = {remat: with_choice(remat) for remat in remat_choices(config)}
    chosen = config.model.remat
    if chosen == "auto":
        chosen = next((remat for remat, choice in choices.items() if choice["fits"]), REMAT[-1])
    return {
        "parameters": _count(params),
        "non_embedding_parameters": _count(params) - by_part["embedding"],
        "parameters_by_part": by_part,
        "forward_flops_by_part": flops,
        "parameter_bytes": size_of(params),
        "optimizer_bytes": size_of(opt_state),
        "gradient_bytes": 0 if config.train.update_in_backward else size_of(params),
        "ema_bytes": ema_bytes,
        "state_bytes": size_of(params) + size_of(opt_state) + ema_bytes,
        "carry_bytes": carry * (config.model.encoder_layers + config.model.decoder_layers),
        "logit_block_bytes": min(config.model.logits_mb * 2**20, 4 * rows * length * vocabulary),
        "group": {
            stack: config.model.group
            or best_group(depth, carry, size_of(params[stack]) / depth, whole=config.train.update_in_backward)
            for stack, depth in (("encoder", config.model.encoder_layers), ("decoder", config.model.decoder_layers))
        },
        "sentence_length": sentence,
        "row_length": length,
        "device": config.plan.device or jax.devices()[0].device_kind,
        "devices": count * config.parallel.model,
        "usable_bytes": usable,
        "remat": choices,
        "chosen_remat": chosen,
        **choices[chosen],
    }


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def compiled_update_bytes(config: Config, rows: int, length: int) -> float:
    """Returns the memory of `update` in bytes, as reported by the local compiler.

    Nothing is run.
    """
    step, state, batch = update(config, rows, length)
    memory: Any = jax.jit(step, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(memory.argument_size_in_bytes + made + memory.temp_size_in_bytes)


def compiled_bytes(config: Config) -> float:
    """Returns `peak_bytes` as reported by the compiler of the local device."""
    count = data_devices(config)
    return max(compiled_update_bytes(config, rows_of(config, length, count), length) for length in lengths(config))


def held_bytes(config: Config) -> float:
    """Parameters, optimiser state, their average and gradients on each device: what no setting of memory avoids."""
    _, state, _ = update(with_remat(config, remat_choices(config)[-1]), 1, 1)
    gradients = 0 if config.train.update_in_backward else size_of(state.params)
    return (size_of(state) + gradients) / config.parallel.model


def fitting(config: Config, memory: float) -> Config:
    """Resolves `model.remat=auto` to the first choice whose predicted peak fits into `memory`, or else to the last.

    Args:
      config: the run.
      memory: bytes of memory available on each device.

    Raises:
      UserError: if `plan.refuse`, and parameters, optimiser state and gradients alone need more than `memory`.
    """
    held = held_bytes(config)
    if config.plan.refuse and held > memory:
        backward = "" if config.train.update_in_backward else "train.update_in_backward=True (keeps no gradients), "
        raise UserError(
            f"parameters, optimiser state and gradients need {held / 1e9:,.2f} GB, but the device has "
            f"{memory / 1e9:,.2f} GB; try in this order: {backward}a larger parallel.model, a smaller model; "
            "--config.plan.refuse=False trains anyway"
        )
    if config.model.remat != "auto":
        return config
    choices = (with_remat(config, remat) for remat in remat_choices(config))
    count = data_size(config.parallel)
    return next((c for c in choices if peak_bytes(c, count) <= memory), with_remat(config, remat_choices(config)[-1]))


def warning(config: Config, memory: float) -> str:
    """One line if the predicted peak of an update is above `memory` bytes, with what lowers it; else ""."""
    remat, needed = config.model.remat, peak_bytes(config, data_size(config.parallel))
    if needed <= memory:
        return ""
    knobs = {
        "model.remat=nested": remat != "nested",
        "a larger train.accumulation": not config.train.update_in_backward,
        "a smaller train.batch_tokens or data.max_length": True,
    }
    return (
        f"warning: an update may not fit: it needs about {needed / 1e9:,.2f} GB with model.remat={remat}, but the "
        f"device has {memory / 1e9:,.2f} GB; if it fails, try in this order: "
        f"{', '.join(knob for knob in knobs if knobs[knob])}; --mode=plan shows what fits"
    )


def format_plan(config: Config, plan: Mapping[str, Any]) -> str:
    """Formats a plan as text that fits on one screen."""
    m, batch_tokens = config.model, config.train.batch_tokens
    depth, length = f"{m.encoder_layers}L-{m.decoder_layers}L", plan["sentence_length"]
    flops = plan["flops_per_target_token"]
    sizes = ("state", "parameter", "optimizer", "ema", "gradient", "carry")
    gb = {name: plan[f"{name}_bytes"] / 1e9 for name in sizes}
    optimiser = f"{gb['optimizer']:,.3f}" + (f", average {gb['ema']:,.3f}" if gb["ema"] else "")
    parts = ", ".join(f"{name} {number:,}" for name, number in plan["parameters_by_part"].items())
    rows = [
        ("model", f"{m.method} {depth}, width {m.width}/{m.ffn_width}, {m.heads} heads"),
        ("parameters", f"{plan['parameters']:,} ({plan['non_embedding_parameters']:,} without embeddings)"),
        ("", parts),
        ("training", f"{flops / 1e6:,.1f} MFLOP per target token at {length:g} tokens a sentence"),
        ("", f"{flops * batch_tokens / 1e12:,.3f} TFLOP per update of {batch_tokens:,} tokens"),
        ("state", f"{gb['state']:,.3f} GB: parameters {gb['parameter']:,.3f}, optimiser {optimiser}"),
        ("update", f"gradients {gb['gradient']:,.3f} GB, carries of all layers {gb['carry']:,.3f} GB"),
        ("device", f"{plan['devices']} x {plan['device']}, {plan['usable_bytes'] / 1e9:,.1f} GB usable"),
    ]
    lines = [f"{name:<12}{text}" for name, text in rows]
    lines += [
        "",
        f"{'model.remat':<15}{'peak GB':>10}{'tokens that fit':>17}{'s/update':>10}{'tokens/s':>10}{'device-days':>13}",
    ]
    for remat, choice in plan["remat"].items():
        days = "" if choice["gpu_days"] is None else f"{choice['gpu_days']:,.2f}"
        lines.append(
            f"{remat + ('  *' if remat == plan['chosen_remat'] else ''):<15}{choice['peak_bytes'] / 1e9:>10,.3f}"
            f"{choice['tokens_per_microbatch']:>17,}{choice['step_seconds']:>10,.3g}"
            f"{choice['target_tokens_per_second']:>10,.0f}{days:>13}" + ("" if choice["fits"] else "  does not fit")
        )
    groups = plan["group"]
    lines += ["", f"nested: groups of {groups['encoder']} and {groups['decoder']} layers (encoder, decoder)"]
    if "compiled_bytes" in plan:
        lines.append(f"compiled with model.remat={plan['chosen_remat']}: peak {plan['compiled_bytes'] / 1e9:,.3f} GB")
    return "\n".join([*lines, PAPER])


def to_json(plan: Mapping[str, Any]) -> str:
    """Formats a plan as the content of plan.json."""
    return json.dumps(plan, indent=2) + "\n"
