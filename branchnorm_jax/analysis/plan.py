"""What a run will cost: operations, memory, time; and whether it fits. Nothing is allocated."""

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
from branchnorm_jax.options import UNK, Config
from branchnorm_jax.parallel.mesh import data_size
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, first_state
from branchnorm_jax.training.step import make_train_step

MATRIX_SHARE, TRAFFIC_SHARE = 0.6, 0.8
"""Of a device's specification, what is reckoned with: matrix products of width 512 and above, and plain kernels."""

HELD = 0.8
"""Times the parameters' bytes: what XLA keeps longer than `costs.peak` does, a median over random runs on the CPU.

It is gradients and directions of all layers, which an update in the backward pass does not have.
"""

SHALLOW, SHARE = (1, 4), 5
"""Depths of encoder and decoder that `calibrate` times, the second at least; at least one over this of the run's."""

PAPER = "BranchNorm's paper: 1000 GPU-days (A100) for 100,000 updates of 524,288 tokens with 500L-500L of width 512"


def forward_flops(config: Config, source_length: float, target_length: float, vocabulary: int) -> dict[str, float]:
    """Multiplications and additions of a forward pass per pair of one source and one target token, by part.

    Matrix products and attention scores are counted, 2 operations per multiply-add; norms, softmax and embeddings are
    not. Lengths are the average sentence's, in tokens: a query meets all source tokens, and half of the target's.
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
    """What the backward pass computes again, per pair of tokens: see the table of `run_stack`."""
    m = config.model
    if m.remat == "save_branches":
        hidden = (4 if m.activation == "swiglu" else 2) * m.width * m.ffn_width
        scores = 2 * m.width
        encoder = m.encoder_layers * (hidden + scores * source_length)
        return encoder + m.decoder_layers * (hidden + scores * (target_length / 2 + source_length))
    return {"none": 0, "full": 1, "nested": 2}[m.remat] * (forward["encoder"] + forward["decoder"])


def with_remat(config: Config, remat: str) -> Config:
    """The same run with this `model.remat`."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def remat_choices(config: Config) -> tuple[str, ...]:
    """Those of `REMAT` that the run could take."""
    return ("full", "nested") if config.train.update_in_backward else REMAT


def shrink(config: Config, encoder_layers: int, decoder_layers: int) -> Config:
    """The same run of a shallower model."""
    changed = dataclasses.replace(config.model, encoder_layers=encoder_layers, decoder_layers=decoder_layers, group=0)
    return dataclasses.replace(config, model=changed)


def update(config: Config, rows: int, length: int) -> tuple[Any, TrainState, Batch]:
    """One device's share of an update, and the shapes of its arguments: a batch of `rows` rows of `length`."""
    alone = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, data=1))
    model = Transformer(config.model, config.data.vocab_size, config.data.vocab_size)
    optimizer = make_optimizer(config.train)
    params = model.abstract_params()
    state = jax.eval_shape(lambda params: first_state(params, optimizer, bool(config.train.ema_decay)), params)
    tokens: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return make_train_step(model, optimizer, alone), state, Batch(tokens, tokens)


@functools.lru_cache
def update_costs(config: Config, rows: int, length: int) -> costs.Costs:
    """Costs of one device's share of an update. Its peak is that of state, batch and all that is made of them."""
    step, state, batch = update(config, rows, length)
    found = costs.trace(step, state, batch, donated=[0])
    held = 0.0 if config.train.update_in_backward else HELD * size_of(state.params)
    split = config.parallel.model
    return costs.Costs(found.flops / split, found.traffic / split, (found.peak + held) / split + size_of(batch))


def rows_of(config: Config, length: int, count: int) -> int:
    """Rows of `length` that one of `count` data-parallel devices has of an update."""
    multiple, parts = config.data.row_multiple, config.train.accumulation
    rows = max(multiple, config.train.batch_tokens // length // multiple * multiple)
    return math.ceil(rows / count / parts) * parts


def lengths(config: Config) -> tuple[int, ...]:
    """Of rows, in batches of short ones and of long ones: the two that may need most."""
    tokens, multiple, longest = config.train.batch_tokens, config.data.row_multiple, config.data.max_length
    sentence = min(config.plan.sentence_length, longest)
    ladder = row_lengths(sentence, longest, tokens, multiple)[-config.data.batch_shapes :]
    return tuple(sorted({ladder[0], ladder[-1]}))


def peak_bytes(config: Config, count: int) -> float:
    """The memory that an update needs of each of `count` data-parallel devices, at worst."""
    return max(update_costs(config, rows_of(config, length, count), length).peak for length in lengths(config))


def seconds(config: Config, device: devices.Device, found: costs.Costs) -> float:
    """Time of what `found` says: matrix products and other kernels run one after the other."""
    matrix = device.matrix if config.model.dtype == "bfloat16" else device.matrix_float32
    return found.flops / (MATRIX_SHARE * matrix) + found.traffic / (TRAFFIC_SHARE * device.bandwidth)


def fitting_tokens(config: Config, memory: float) -> int:
    """Positions of the largest microbatch that fits, a side; 0 if not even one sentence does.

    The peak is a convex function of the rows, the largest of several straight lines: so the chord between rows that fit
    and rows that do not meets `memory` at rows that fit.
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
    """Devices that the rows of a batch are split over. Raises `UserError` if `parallel.model` does not divide all."""
    devices = config.plan.devices or jax.device_count()
    if devices % config.parallel.model:
        raise UserError(f"config: parallel.model={config.parallel.model} does not divide {devices} devices")
    return devices // config.parallel.model


def calibrate(config: Config) -> Callable[[float], float]:
    """From `seconds` to seconds on the device at hand: the straight line through two shallow models of this width.

    They are allocated, compiled and run, with the batches of the run. What a layer takes is then measured, whatever the
    specification says; depth is what the line extends.
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
    """Time of an update of random words on the device at hand: the median, after the first."""
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
    """Parameters, operations, bytes, time of a run, for each `model.remat`: the content of `plan.json`.

    Args:
      config: the run.
      progress: called after each of `remat_choices`.

    Raises:
      UserError: if the device is not known.
    """
    if config.plan.calibrate and config.plan.device:
        raise UserError("config: plan.calibrate times the device at hand; leave plan.device empty")
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
        chosen = next((remat for remat, found in choices.items() if found["fits"]), REMAT[-1])
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
    """What the compiler of the device at hand says that `update` needs; nothing runs."""
    step, state, batch = update(config, rows, length)
    found: Any = jax.jit(step, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    made = found.output_size_in_bytes - found.alias_size_in_bytes
    return float(found.argument_size_in_bytes + made + found.temp_size_in_bytes)


def compiled_bytes(config: Config) -> float:
    """`peak_bytes` as the compiler of the device at hand has it."""
    count = data_devices(config)
    return max(compiled_update_bytes(config, rows_of(config, length, count), length) for length in lengths(config))


def fitting(config: Config, memory: float) -> Config:
    """The run with `model.remat=auto` decided, for the devices at hand, of whose memory it gets so many bytes each.

    Raises:
      UserError: if an update needs more than that, with what would help, unless `plan.refuse` is off.
    """
    if config.model.remat != "auto" and not config.plan.refuse:
        return config
    count = data_size(config.parallel)
    choices = remat_choices(config) if config.model.remat == "auto" else (config.model.remat,)
    for remat in choices:
        chosen = with_remat(config, remat)
        needed = peak_bytes(chosen, count)
        if needed <= memory or (remat == choices[-1] and not config.plan.refuse):
            return chosen
    knobs = {
        "model.remat=nested": remat != "nested",
        "a larger train.accumulation": not config.train.update_in_backward,
        "a smaller train.batch_tokens or data.max_length": True,
    }
    raise UserError(
        f"an update needs {needed / 1e9:,.2f} GB with model.remat={remat}, the device has {memory / 1e9:,.2f} GB; in "
        f"this order: {', '.join(knob for knob, helps in knobs.items() if helps)}; --mode=plan shows what fits, "
        "--config.plan.refuse=False tries it all the same"
    )


def format_plan(config: Config, plan: Mapping[str, Any]) -> str:
    """One screen of table."""
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
        ("device", f"{plan['devices']} x {plan['device']}, {plan['usable_bytes'] / 1e9:,.1f} GB to use"),
    ]
    lines = [f"{name:<12}{text}" for name, text in rows]
    lines += [
        "",
        f"{'model.remat':<15}{'peak GB':>10}{'tokens that fit':>17}{'s/update':>10}{'tokens/s':>10}{'device-days':>13}",
    ]
    for remat, found in plan["remat"].items():
        days = "" if found["gpu_days"] is None else f"{found['gpu_days']:,.2f}"
        lines.append(
            f"{remat + ('  *' if remat == plan['chosen_remat'] else ''):<15}{found['peak_bytes'] / 1e9:>10,.3f}"
            f"{found['tokens_per_microbatch']:>17,}{found['step_seconds']:>10,.3g}"
            f"{found['target_tokens_per_second']:>10,.0f}{days:>13}" + ("" if found["fits"] else "  does not fit")
        )
    groups = plan["group"]
    lines += ["", f"nested: groups of {groups['encoder']} and {groups['decoder']} layers (encoder, decoder)"]
    if "compiled_bytes" in plan:
        lines.append(f"compiled with model.remat={plan['chosen_remat']}: peak {plan['compiled_bytes'] / 1e9:,.3f} GB")
    return "\n".join([*lines, PAPER])


def to_json(plan: Mapping[str, Any]) -> str:
    """plan.json."""
    return json.dumps(plan, indent=2) + "\n"
