"""Cost plan of a run: what each choice of `model.remat` costs, and whether it fits the device."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.analysis import devices
from branchnorm_jax.analysis.estimate import (
    calibrate,
    data_devices,
    fitting_tokens,
    forward_flops,
    held_bytes,
    lengths,
    peak_bytes,
    recomputed_flops,
    remat_choices,
    remat_order,
    rows_of,
    seconds,
    sentence_length,
    update_costs,
    with_remat,
)
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.stack import best_group, size_of
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.parallel.mesh import row_devices
from branchnorm_jax.training.optimizer import make_optimizer

PAPER = "BranchNorm's paper: 1000 GPU-days (A100) for 100,000 updates of 524,288 tokens with 500L-500L of width 512"


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
    rows = rows_of(config, length, count)
    sentence = sentence_length(config)
    flops = forward_flops(config, sentence, sentence, vocabulary)
    on_device = calibrate(config) if config.plan.calibrate else float

    def cost(remat: str) -> dict[str, Any]:
        choice = with_remat(config, remat)
        step = on_device(seconds(config, device, update_costs(choice, rows, length)))
        peak = peak_bytes(choice, count)
        tokens = fitting_tokens(choice, device.memory)
        progress()
        return {
            "flops_per_target_token": 3 * sum(flops.values()) + recomputed_flops(choice, flops, sentence, sentence),
            "peak_bytes": peak,
            "fits": peak <= device.memory,
            "tokens_per_microbatch": tokens,
            "step_seconds": step,
            "target_tokens_per_second": rows * length * count / step,
            "gpu_days": config.train.steps * step * count * config.parallel.model / 86_400 or None,
        }

    costs = {remat: cost(remat) for remat in remat_choices(config)}
    chosen = config.model.remat
    if chosen == "auto":
        order = [choice.model.remat for choice in remat_order(config)]
        chosen = next((remat for remat in order if costs[remat]["fits"]), order[-1])
    return {
        **_sizes(config, rows, length),
        "forward_flops_by_part": flops,
        "sentence_length": sentence,
        "row_length": length,
        # For documents, batch_tokens is rounded down to whole rows.
        "tokens_per_update": rows * length * count if config.data.source == "documents" else config.train.batch_tokens,
        "device": config.plan.device or jax.devices()[0].device_kind,
        "devices": count * config.parallel.model,
        "usable_bytes": device.memory,
        "remat": costs,
        "chosen_remat": chosen,
        **costs[chosen],
    }


def _sizes(config: Config, rows: int, length: int) -> dict[str, Any]:
    """Returns what does not depend on `model.remat`: numbers of parameters, and bytes of state and activations."""
    vocabulary, depth = config.data.vocab_size, config.model.layers
    params = Transformer(config.model, vocabulary, vocabulary).abstract_params()
    opt_state = jax.eval_shape(make_optimizer(config.train, config.model).init, params)
    ema_bytes = size_of(params) if config.train.ema_decay else 0
    by_part = {name: _count(part) for name, part in params.items()}
    carry = (
        rows // config.train.accumulation * length * config.model.width * jnp.dtype(config.model.carry_dtype).itemsize
    )
    in_backward = config.train.update_in_backward
    return {
        "parameters": _count(params),
        "non_embedding_parameters": _count(params) - by_part["embedding"],
        "parameters_by_part": by_part,
        "parameter_bytes": size_of(params),
        "optimizer_bytes": size_of(opt_state),
        "gradient_bytes": 0 if in_backward else size_of(params),
        "ema_bytes": ema_bytes,
        "state_bytes": size_of(params) + size_of(opt_state) + ema_bytes,
        "carry_bytes": carry * sum(depth),
        "group": {"full": with_remat(config, "full").model.group or 1}
        | {
            stack: config.model.group or best_group(layers, carry, size_of(params[stack]) / layers, whole=in_backward)
            for stack, layers in zip(config.model.stacks, depth, strict=True)
        },
    }


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def format_plan(config: Config, plan: Mapping[str, Any]) -> str:
    """Formats a plan as text that fits on one screen."""
    m, batch_tokens = config.model, plan["tokens_per_update"]
    depth, length = m.depth, plan["sentence_length"]
    flops = plan["flops_per_target_token"]
    sizes = ("state", "parameter", "optimizer", "ema", "gradient", "carry")
    gb = {name: plan[f"{name}_bytes"] / 1e9 for name in sizes}
    optimiser = f"{gb['optimizer']:,.3f}" + (f", average {gb['ema']:,.3f}" if gb["ema"] else "")
    parts = ", ".join(f"{name} {number:,}" for name, number in plan["parameters_by_part"].items())
    parts_of = f" in {config.train.accumulation} parts" if config.train.accumulation > 1 else ""
    rows = [
        ("model", f"{m.method} {depth}, width {m.width}/{m.ffn_width}, {m.heads} heads"),
        ("parameters", f"{plan['parameters']:,} ({plan['non_embedding_parameters']:,} without embeddings)"),
        ("", parts),
        ("training", f"{flops / 1e6:,.1f} MFLOP per target token at {length:g} tokens a {m.sequence}"),
        ("", f"{flops * batch_tokens / 1e12:,.3f} TFLOP per update of {batch_tokens:,} tokens{parts_of}, {m.dtype}"),
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
    nested = " and ".join(f"{groups[stack]} in the {stack}" for stack in m.stacks)
    lines += ["", f"layers per group: full {groups['full']}, nested {nested}"]
    if "compiled_bytes" in plan:
        lines.append(f"compiled with model.remat={plan['chosen_remat']}: peak {plan['compiled_bytes'] / 1e9:,.3f} GB")
    return "\n".join([*lines, PAPER])


def to_json(plan: Mapping[str, Any]) -> str:
    """Formats a plan as the content of plan.json."""
    return json.dumps(plan, indent=2) + "\n"


def resolve_remat(config: Config, memory: float) -> Config:
    """Chooses the loops of the run, and for `model.remat=auto` the first of `remat_order` that fits, or else the last.

    Args:
      config: the run.
      memory: bytes of memory available on each device.

    Raises:
      UserError: if `plan.refuse` is set, and parameters, optimiser state and gradients alone need more than `memory`.
    """
    held = held_bytes(config)
    if config.plan.refuse and held > memory:
        backward = "" if config.train.update_in_backward else "train.update_in_backward=True (keeps no gradients), "
        raise UserError(
            f"parameters, optimiser state and gradients need {held / 1e9:,.2f} GB, but the device has "
            f"{memory / 1e9:,.2f} GB; try in this order: {backward}a larger parallel.fsdp or parallel.model, a "
            "smaller model; --config.plan.refuse=False trains anyway"
        )
    if config.model.remat != "auto":
        return with_remat(config, config.model.remat)
    choices, count = remat_order(config), row_devices(config.parallel)
    return next((choice for choice in choices if peak_bytes(choice, count) <= memory), choices[-1])


def warning(config: Config, memory: float, needed: float) -> str:
    """Returns a warning if the compiled update needs more than `memory` bytes on a device, or "".

    The warning is one line and lists the options that lower the need.
    """
    remat = config.model.remat
    longest = "data.context" if config.data.source == "documents" else "data.max_length"
    if needed <= memory:
        return ""
    knobs = {
        "model.remat=nested": remat != "nested",
        "a larger train.accumulation": not config.train.update_in_backward,
        f"a smaller train.batch_tokens or {longest}": True,
    }
    return (
        f"warning: an update may not fit: it needs {needed / 1e9:,.2f} GB with model.remat={remat}, but the "
        f"device has {memory / 1e9:,.2f} GB; if it fails, try in this order: "
        f"{', '.join(knob for knob in knobs if knobs[knob])}; --mode=plan shows what fits"
    )
