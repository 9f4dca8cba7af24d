"""The collectives of a real update, by the compilers of absent TPUs and GPUs; and the rules of their memory."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from branchnorm_jax.analysis import costs, topologies
from branchnorm_jax.analysis.collectives import collectives, per_iteration
from branchnorm_jax.analysis.devices import DEVICES, platform
from branchnorm_jax.analysis.estimate import parts, stored, update, update_costs
from branchnorm_jax.analysis.program import cycles, parse
from branchnorm_jax.analysis.rules import RULES, Rules
from branchnorm_jax.model.stack import size_of
from branchnorm_jax.options import Config, DataConfig, ModelConfig, ParallelConfig
from branchnorm_jax.training.lower import allocated_bytes
from tests.conftest import TINY, run_main

TPU = importlib.util.find_spec("libtpu") is not None
CUDA = importlib.util.find_spec("jax_plugins") is not None and any(map(importlib.util.find_spec, topologies.PLUGINS))

N, D, L = 64, 32, 7
x = jax.ShapeDtypeStruct((N, D), jnp.float32)
w = jax.ShapeDtypeStruct((D, D), jnp.float32)
many = jax.ShapeDtypeStruct((L, D, D), jnp.float32)
X, W = 4 * N * D, 4 * D * D


def needs(installed: bool, name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not installed, reason=f"needs {name}: pip install -r requirements/{name}.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "fsdp", "remat"),
    [
        pytest.param("v5e:2x2:x2", 4, "full", marks=needs(TPU, "tpu")),
        pytest.param("v5e:2x2:x2", 4, "none", marks=needs(TPU, "tpu")),
        pytest.param("h200:2x2", 2, "full", marks=needs(CUDA, "gpu")),
        pytest.param("h200:2x2", 2, "none", marks=needs(CUDA, "gpu")),
    ],
)
def test_layers_communicate_along_fsdp_only(target: str, fsdp: int, remat: str, tmp_path: Path) -> None:
    """Each layer gathers its matrices and sums its gradients; slices and hosts exchange each gradient once per update.

    So no loop gathers a whole stack, and none moves activations between devices.
    """
    width, hidden, text = 128, 256, tmp_path / "program.txt"
    done = run_main(
        "--mode=plan", *TINY, f"--workdir={tmp_path}", f"--config.plan.compile={target}",
        f"--config.model.remat={remat}", f"--config.model.width={width}", f"--config.model.ffn_width={hidden}",
        "--config.model.dtype=bfloat16",
        f"--config.parallel.fsdp={fsdp}", f"--config.plan.program={text}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    report = plan["compiled"]
    assert report["mesh"] == {"data": 2, "fsdp": fsdp, "model": 1}
    assert report["unknown_loops"] == []
    matrices = {attentions * 4 * width**2 + 2 * width * hidden for attentions in (1, 2)}
    loops = per_iteration(collectives(parse(text.read_text())))
    assert loops
    for sums in loops.values():
        kinds = {kind for kind, _ in sums}
        assert kinds <= {"all-gather", "reduce-scatter", "all-reduce"}
        assert {number for _, number in sums} == {fsdp}
        assert sums.get(("all-gather", fsdp), 0) * fsdp in {2 * number for number in matrices}
        summed = sum(size for (kind, _), size in sums.items() if kind != "all-gather")
        assert summed < 1.1 * 4 * max(matrices)
    assert report["between_in_loops_bytes"] == 0
    between = sum(part["between_bytes"] for part in report["collectives"].values())
    assert 0.9 < between / (plan["gradient_bytes"] / fsdp) < 1.3


def test_collectives_per_iteration_and_cycles() -> None:
    program = parse("""
%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8] get-tuple-element(%state), index=1
  %y = f32[8] negate(%x), backend_config={"estimated_cycles":"10"}
  %half = f32[4] slice(%y), slice={[0:4]}
  %whole = f32[8] all-gather(%half), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}
  %again = f32[8] all-gather(%half), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %pair = (s32[], f32[8]) tuple(%i, %whole)
}

%condition (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[8]) tuple(%zero, %x.1)
  %loop = (s32[], f32[8]) while(%begin), condition=%condition, body=%body, known_trip_count={"n":"7"}
  %z = f32[8] get-tuple-element(%loop), index=1
  %unknown = f32[8] negate(%z), backend_config={"estimated_cycles":"9223372036854775807"}
  %sum = f32[8] all-reduce(%unknown), channel_id=3, replica_groups={}, to_apply=%condition
  ROOT %result = f32[8] negate(%sum), backend_config={"estimated_cycles":"5"}
}
""")
    assert per_iteration(collectives(program)) == {"loop x 7": {("all-gather", 2): 32}}
    assert cycles(program) == 7 * 10 + 5


def peak(function: Any, *arguments: Any, **rules: Any) -> float:
    return costs.trace(function, *arguments, rules=Rules(**rules)).peak


def test_rules_of_operands_and_constants() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ w

    assert peak(product, x, w) - peak(product, x, w, fuses_operands=True) == X

    def added(x: jax.Array, many: jax.Array) -> jax.Array:
        ones = jnp.ones((4, N, D))
        return jax.lax.scan(lambda c, w: (jnp.sin(c @ w) * ones.sum(0), None), x, many)[0]

    assert peak(added, x, many) - peak(added, x, many, keeps_constants=False) >= 2 * X


def test_a_stack_that_a_loop_reads_in_another_type_is_converted_before_the_loop() -> None:
    def forward(x: jax.Array, many: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.sin(c @ w.astype(jnp.bfloat16)).astype(c.dtype), None), x, many)[0]

    half = jax.ShapeDtypeStruct((N, D), jnp.bfloat16)
    assert peak(forward, half, many, converts_stacks=True) - peak(forward, half, many) == L * W / 2

    def twice(x: jax.Array, many: jax.Array) -> jax.Array:
        return forward(forward(x, many), many)

    assert peak(twice, half, many, converts_stacks=True) - peak(twice, half, many) == L * W / 2

    def exact(x: jax.Array, many: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.sin(c @ w.astype(jnp.bfloat16)) + w.sum(), None), x, many)[0]

    assert peak(exact, x, many, converts_stacks=True) == peak(exact, x, many)


def test_equal_conversions_and_equal_stacked_results_are_merged() -> None:
    def layer(c: jax.Array, w: jax.Array) -> Any:
        a, b = (c.astype(jnp.bfloat16) for _ in range(2))
        return (a @ w + b @ w).astype(c.dtype), (a, b)

    weights = jax.ShapeDtypeStruct((L, D, D), jnp.bfloat16)

    def stacked(x: jax.Array, many: jax.Array) -> Any:
        return jax.lax.scan(layer, x, many)[1]

    # One stack and one conversion instead of two.
    assert peak(stacked, x, weights) - peak(stacked, x, weights, merges=True) >= L * X / 2


def test_order_and_results_of_a_loop() -> None:
    def forward(x: jax.Array, many: jax.Array) -> Any:
        def layer(c: jax.Array, w: jax.Array) -> Any:
            a = jnp.tanh(c @ w)
            b = jnp.sin(a @ w)
            return b @ w, a

        return jax.lax.scan(layer, x, many)

    # Without the rule, the loop keeps the stacked result `a` until the end of the iteration.
    assert peak(forward, x, many, stacks_at_once=True) < peak(forward, x, many)

    def backward(many: jax.Array, x: jax.Array) -> jax.Array:
        def layer(c: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(jnp.sin(c @ w) @ w), None

        return jax.lax.scan(layer, x, many)[0].sum()

    gradient = jax.grad(backward)
    assert peak(gradient, many, x, carry_first=True) >= peak(gradient, many, x)

    def reduced(x: jax.Array, many: jax.Array) -> Any:
        def layer(c: jax.Array, w: jax.Array) -> Any:
            a = c @ w
            total = a.sum()
            return jnp.sin(a @ w) @ w, total

        return jax.lax.scan(layer, x, many)

    # The sum does not wait until the end of the iteration, so its operand is freed as without it.
    kept = peak(reduced, x, many, carry_first=True) - peak(lambda *xs: reduced(*xs)[0], x, many, carry_first=True)
    assert kept < X / 2


def test_products_write_the_type_that_is_read() -> None:
    def scores(x: jax.Array, w: jax.Array) -> Any:
        half = jnp.where(jnp.arange(D) < D - 1, x @ w, -1.0).astype(jnp.float16)
        wide = half.astype(jnp.float32)
        return jnp.exp(wide).sum(), wide.max()

    w = jax.ShapeDtypeStruct((D, D), jnp.float32)
    # The product is the only array besides the arguments.
    assert peak(scores, x, w) - peak(scores, x, w, fuses_conversions=True) == X / 2

    def product(x: jax.Array, w: jax.Array) -> Any:
        return (x @ w).astype(jnp.float16).astype(jnp.float32) @ w

    # A product reads its operands in its own type.
    assert peak(product, x, w, fuses_conversions=True) >= 2 * X


def test_every_device_has_rules() -> None:
    assert {platform(name) for name in (*DEVICES, "cpu", "")} == set(RULES)
    assert (platform("v100"), platform("v5e"), platform("")) == ("gpu", "tpu", jax.default_backend())


def test_values_that_devices_share() -> None:
    """Stacks of matrices are split over fsdp and model, activations over model, and a layer's matrix over model."""
    model = ModelConfig(encoder_layers=6, decoder_layers=4, width=16, ffn_width=64, heads=4)
    config = Config(
        model=model, data=DataConfig(vocab_size=96), parallel=ParallelConfig(data=2, fsdp=4, model=2)
    )  # fmt: skip
    of = parts(config, update(config, 1, 1)[1].params)
    assert of((6, 16, 64)) == of((3, 2, 64, 16)) == of((4, 16, 16)) == of((96, 16)) == 8
    assert of((16, 64)) == of((8, 32, 64)) == of((8, 4, 32, 32)) == of((8, 32, 4, 4)) == of((128, 96)) == 2
    assert of(()) == of((6, 16)) == of((8, 32, 16)) == of((6, 8, 32, 16)) == 1


def test_tpus_keep_two_arrays_for_each_gradient_of_a_split_run_with_nested() -> None:
    model = ModelConfig(encoder_layers=6, decoder_layers=4, width=16, ffn_width=64, heads=4, remat="nested")
    config = Config(model=model, data=DataConfig(vocab_size=96), parallel=ParallelConfig(fsdp=2))
    peaks = {
        name: update_costs(dataclasses.replace(config, plan=dataclasses.replace(config.plan, device=name)), 1, 8).peak
        for name in ("v5e", "h200")
    }
    params = update(config, 1, 1)[1].params
    # Parameters, two moments, and two arrays for each gradient.
    assert peaks["h200"] < 5 * stored(config, params)[0] * size_of(params) <= peaks["v5e"]


def test_allocated_bytes_are_the_parts_of_a_program() -> None:
    compiled = jax.jit(lambda x, w: jnp.sin(x @ w) @ w, donate_argnums=0).lower(x, w).compile()
    memory: Any = compiled.memory_analysis()
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert arguments == X + W
    assert allocated_bytes(compiled) == pytest.approx(arguments + results + memory.temp_size_in_bytes, rel=0.01)
    assert math.isfinite(allocated_bytes(compiled))
