"""Reads optimised programs: written by hand, made by this machine's compiler, and made by the TPU compiler."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.analysis import compiled, topologies
from branchnorm_jax.analysis.collectives import KINDS, Collective, collectives, replica_groups, sent, traffic
from branchnorm_jax.analysis.devices import DEVICES
from branchnorm_jax.analysis.program import arrays, executed, largest_buffers, parse, unknown_loops
from branchnorm_jax.errors import MissingExtraError, UserError
from tests.conftest import TINY, run_main

TPU = importlib.util.find_spec("libtpu") is not None
CUDA = importlib.util.find_spec("jax_plugins") is not None and any(map(importlib.util.find_spec, topologies.PLUGINS))

LOOPS = """
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%less (p: s32[], q: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %lt = pred[] compare(%p, %q), direction=LT
}

%next (p.1: s32[], q.1: s32[]) -> s32[] {
  %p.1 = s32[] parameter(0)
  %q.1 = s32[] parameter(1)
  ROOT %add.1 = s32[] add(%p.1, %q.1)
}

%inner_condition (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %limit = s32[] constant(10)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %fused.1 = pred[] fusion(%i.1, %limit), kind=kLoop, calls=%less
}

%inner (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(256)}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %two = s32[] constant(2)
  %i.next = s32[] fusion(%i, %two), kind=kLoop, calls=%next
  %reduced = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, metadata={op_name="while/psum"}
  ROOT %pair = (s32[], f32[8]) tuple(%i.next, %reduced)
}

%outer (outer_state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %outer_state = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%outer_state), index=0
  %y = f32[8]{0} get-tuple-element(%outer_state), index=1
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %inner_state = (s32[], f32[8]) tuple(%start, %y)
  %loop.1 = (s32[], f32[8]) while(%inner_state), condition=%inner_condition, body=%inner
  %z = f32[8]{0} get-tuple-element(%loop.1), index=1
  ROOT %pair.1 = (s32[], f32[8]) tuple(%j, %z)
}

%outer_condition (outer_state.1: (s32[], f32[8])) -> pred[] {
  %outer_state.1 = (s32[], f32[8]) parameter(0)
  ROOT %true = pred[] constant(true)
}

%async (param: f32[8]) -> f32[2] {
  %param = f32[8]{0} parameter(0)
  ROOT %scattered = f32[2]{0} reduce-scatter(%param), channel_id=3, replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (argument: f32[8], table: bf16[4,8]) -> f32[8] {
  %argument = f32[8]{0} parameter(0)
  %table = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="state.params[\\'table\\']"}
  %one = s32[] constant(1)
  %state.2 = (s32[], f32[8]) tuple(%one, %argument)
  %loop.2 = (s32[], f32[8]) while(%state.2), condition=%outer_condition, body=%outer, known_trip_count={"n":"7"}
  %carried = f32[8]{0} get-tuple-element(%loop.2), index=1
  %gather = (f32[8]{0}, f32[16]{0}) all-gather-start(%carried), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0)
  %gathered = f32[16]{0} all-gather-done(%gather)
  %scatter = ((f32[8]), f32[2], u32[]) async-start(%carried), calls=%async
  %done = f32[2]{0} async-done(%scatter)
  %exchange = (f32[8], f32[8], u32[]) collective-permute-start(%carried), source_target_pairs={{0,2},{2,0}}
  %exchanged = f32[8]{0} collective-permute-done(%exchange)
  %both = (f32[8], bf16[4,8]) all-reduce(%exchanged, %table), channel_id=5, replica_groups={}, to_apply=%add
  ROOT %result = f32[8]{0} get-tuple-element(%both), index=0
}
"""
"""Seven iterations around five: the counter of the inner loop goes from 0 to 10 in steps of 2."""


def test_collectives_in_nested_loops_and_asynchronous_collectives() -> None:
    found = collectives(parse(LOOPS))
    assert [(c.kind, c.payload, c.times) for c in found] == [
        ("all-reduce", 32, 35),
        ("all-gather", 32, 1),
        ("reduce-scatter", 32, 1),
        ("collective-permute", 32, 1),
        ("all-reduce", 32 + 64, 1),
    ]
    assert found[0].loops == ("loop.2 x 7", "loop.1 x 5")
    assert found[0].name == "while/psum"
    assert [c.groups for c in found] == [
        ((0, 1), (2, 3)),
        ((0, 2), (1, 3)),
        ((0, 1, 2, 3),),
        ((0, 2), (2, 0)),
        (),
    ]
    # Devices 0 and 1 are on one host, 2 and 3 on another.
    sums = traffic(found, [0, 0, 1, 1])
    assert list(sums) == ["all-gather", "reduce-scatter", "all-reduce", "collective-permute"]
    assert sums["all-gather"] == {"executions": 1, "inside_bytes": 0, "between_bytes": 32}
    assert sums["reduce-scatter"] == {"executions": 1, "inside_bytes": 16, "between_bytes": 8}
    assert sums["all-reduce"] == {"executions": 36, "inside_bytes": 35 * 32 + 96, "between_bytes": 48}
    assert sums["collective-permute"] == {"executions": 1, "inside_bytes": 0, "between_bytes": 32}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("constant(10)", "parameter(1)"),
        ("%two = s32[] constant(2)", "%two = s32[] parameter(1)"),
        ("%zero = s32[] constant(0)", "%zero = s32[] parameter(1)"),
        ("ROOT %add.1 = s32[] add", "ROOT %add.1 = s32[] multiply"),
    ],
    ids=("comparison", "limit", "step", "start", "no sum"),
)
def test_loops_of_unknown_length_count_once_and_are_named(old: str, new: str) -> None:
    assert unknown_loops(parse(LOOPS)) == []
    assert old in LOOPS
    program = parse(LOOPS.replace(old, new))
    assert unknown_loops(program) == ["loop.1"]
    assert collectives(program)[0].times == 7


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, dimensions={0}", ((0, 2), (1, 3))),
        ("replica_groups={}", ()),
        ("channel_id=1, to_apply=%add", ()),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[4,2]<=[2,2,2]T(1,0,2)", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("replica_groups=mesh[a=8] {a:(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", ((0, 1), (1, 2), (2, 0))),
    ],
    ids=str,
)
def test_notations_of_replica_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert replica_groups(text) == groups


@pytest.mark.parametrize("kind", KINDS[:4])
def test_both_levels_of_a_ring_send_as_much_as_one_ring(kind: str) -> None:
    groups = (tuple(range(8)), tuple(range(8, 16)))
    collective = Collective(kind, 1000, groups, 1, (), "")
    one = sent(collective, [0] * 16)
    two = sent(collective, [0, 0, 1, 1, 2, 2, 3, 3] * 2)
    whole = {"all-gather": 7000, "reduce-scatter": 875, "all-reduce": 1750, "all-to-all": 875}[kind]
    assert one == (whole, 0)
    assert two.inside + two.between == pytest.approx(whole)
    assert two.inside > 0 < two.between
    # With one device in each domain, everything is sent between domains.
    assert sent(collective, [*range(8), *range(8)]) == pytest.approx((0, whole))


def test_messages_between_slices() -> None:
    """The TPU compiler reduces inside the slices itself, and leaves the rest to its runtime: a send and a receive."""
    program = parse("""
ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0:T(256)} parameter(0)
  %part = f32[64] reduce-scatter(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  %token = token[] after-all()
  %send = (f32[64], u32[], token[]) send(%part, %token), attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv = (f32[64], u32[], token[]) recv(%token), attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %received = (f32[64], token[]) recv-done(%recv), channel_id=3, is_host_transfer=true
  %sum = f32[64]{0:T(256)} get-tuple-element(%received), index=0
  ROOT %whole = f32[256]{0:T(256)} all-gather(%sum), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
""")
    sums = traffic(collectives(program), [0] * 4 + [1] * 4)
    assert {kind: (part["inside_bytes"], part["between_bytes"]) for kind, part in sums.items()} == {
        "all-gather": (3 * 256, 0),
        "reduce-scatter": (3 * 256, 0),
        "all-reduce": (0, 256),
    }
    # As much as one all-reduce over the 8 devices of both slices.
    whole = sent(Collective("all-reduce", 1024, (), 1, (), ""), [0] * 4 + [1] * 4)
    assert whole == (6 * 256, 256)


def test_a_collective_that_runs_beside_several_kernels_counts_once() -> None:
    kernel = """
%kernel.{0} (p.{0}: f32[8]) -> f32[32] {{
  %p.{0} = f32[8] parameter(0)
  ROOT %gather.{0} = f32[32] all-gather(%p.{0}), channel_id=9, config={{"async_collective_fusion_config":{{}}}}
}}
"""
    entry = """
ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8] parameter(0)
  %begin = f32[32] fusion(%x), kind=kCustom, calls=%kernel.1
  %beside = f32[32] fusion(%x), kind=kCustom, calls=%kernel.2
  ROOT %end = f32[32] fusion(%x), kind=kCustom, calls=%kernel.3
}
"""
    found = collectives(parse("".join(map(kernel.format, (1, 2, 3))) + entry))
    assert [(c.kind, c.payload, c.times) for c in found] == [("all-gather", 32, 1)]


def test_an_all_reduce_whose_result_is_sliced_in_the_same_kernel_is_a_reduce_scatter() -> None:
    """Two of them with the same channel count twice."""
    program = parse("""
%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %p = f32[8] parameter(0)
  %i = s32[] constant(0)
  %sum = f32[8] all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[2] dynamic-slice(%sum, %i), dynamic_slice_sizes={2}
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[2] {
  %x = f32[8] parameter(0)
  %one = f32[2] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %two = f32[2] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
""")
    assert [(c.kind, c.payload) for c in collectives(program)] == [("reduce-scatter", 32)] * 2


def test_memory_of_arrays() -> None:
    """Tiles pad the innermost axes; S(1) is the vector memory of a TPU."""
    array, packed, small, fast = arrays(
        "(f32[5,3,130]{2,1,0:T(8,128)}, bf16[8,128]{0,1:T(8,128)(2,1)}, s4[3]{0}, f32[4]{0:T(128)S(1)})"
    )
    assert (array.bytes, array.padded_bytes) == (4 * 5 * 3 * 130, 4 * 5 * 8 * 256)
    assert (packed.bytes, packed.padded_bytes) == (2048, 2 * 128 * 128)
    assert small.padded_bytes == 2
    assert array.in_main_memory and not fast.in_main_memory
    assert [array.bytes for array in arrays("(f8e4m3fn[8], pred[8], c64[8], token[])")] == [8, 8, 64, 0]


def test_largest_arrays_leave_out_updates_in_place_and_parts_of_kernels() -> None:
    program = parse("""
%update (stack: f32[6,100], row: f32[1,100], i: s32[]) -> f32[6,100] {
  %stack = f32[6,100] parameter(0)
  %row = f32[1,100] parameter(1)
  %i = s32[] parameter(2)
  %inside = f32[6,100] negate(%stack)
  ROOT %written = f32[6,100] dynamic-update-slice(%stack, %row, %i, %i)
}

ENTRY %main (weights: f32[6,100], bias: f32[50]) -> f32[6,100] {
  %weights = f32[6,100] parameter(0), metadata={op_name="state.params[\\'kernel\\']"}
  %bias = f32[50] parameter(1)
  %i.1 = s32[] constant(0)
  %made = f32[6,100] broadcast(%i.1), dimensions={}, metadata={op_name="jit(step)/zeros"}
  %copy = f32[6,100] copy(%weights)
  %row.1 = f32[1,100] slice(%weights), slice={[0:1], [0:100]}
  ROOT %fused = f32[6,100] fusion(%made, %row.1, %i.1), kind=kLoop, calls=%update
}
""")
    largest = largest_buffers(program, 3)
    assert [(b.bytes, b.number, b.array, b.argument, b.name) for b in largest] == [
        (2400, 1, "f32[6,100]", True, "state.params['kernel']"),
        (2400, 2, "f32[6,100]", False, "jit(step)/zeros"),
        (400, 1, "f32[1,100]", False, "row.1"),
    ]


SCAN = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

def run(x):
    def inner(carry, _):
        return 0.5 * jax.lax.psum(carry, "model"), None

    def outer(carry, _):
        carry, _ = jax.lax.scan(inner, carry, None, length=3)
        return carry + jax.lax.all_gather(carry, "data").sum(0), None

    x, _ = jax.lax.scan(outer, x, None, length=5)
    parts = jax.lax.psum_scatter(x, "model", tiled=True), jax.lax.all_to_all(x.reshape(2, -1), "model", 0, 0)
    return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]) + parts[0].sum() + parts[1].sum()

split = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
print(jax.jit(split).lower(jax.ShapeDtypeStruct((8,), np.float32)).compile().as_text())
"""


def test_program_of_this_machines_compiler() -> None:
    """Loops of 5 and 3 iterations over a mesh of (2 hosts, 2 devices): every collective is known in closed form."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, "-c", SCAN], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    program = parse(done.stdout)
    assert unknown_loops(program) == []
    sums = traffic(collectives(program), [0, 0, 1, 1])
    assert {kind: tuple(part.values()) for kind, part in sums.items()} == {
        "all-gather": (5, 0, 5 * 32),
        "reduce-scatter": (1, 16, 0),
        "all-reduce": (15, 15 * 32, 0),
        "all-to-all": (1, 16, 0),
        "collective-permute": (1, 0, 32),
    }
    assert max(instruction.times for instruction in executed(program)) == 15


@pytest.mark.parametrize(
    ("text", "device", "count", "platform"),
    [
        ("v5p:4x4x4", "v5p", 64, "tpu"),
        ("v5e:4x4:x2", "v5e", 32, "tpu"),
        ("v6e:16x16", "v6e", 256, "tpu"),
        ("h200:8", "h200", 8, "cuda"),
        ("h100:2x8", "h100", 16, "cuda"),
    ],
)
def test_names_of_absent_devices(text: str, device: str, count: int, platform: str) -> None:
    target = topologies.parse(text)
    assert (target.device, target.count, target.platform) == (device, count, platform)
    assert target.device in DEVICES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p", "neither here, none nor a device with its topology, such as v5p:4x4x4"),
        ("False", "neither here, none nor a device"),
        ("b200:8", "the devices are v4, v5e, v5p, v6e, h100, h200"),
        ("v5e:4x4x2", "v5e has 2 sizes, such as v5e:4x4; write several slices as v5e:4x4:x2"),
        ("v5p:4x4", "v5p has 3 sizes, such as v5p:4x4x4"),
        ("v5e:0x4", "neither here"),
        ("h100:2x8x2", "write h100:GPUS or h100:HOSTSxGPUS"),
        ("h100:8:x2", "write h100:GPUS or h100:HOSTSxGPUS"),
    ],
)
def test_unknown_absent_devices_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        topologies.parse(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("text", "extra"), [("v5e:2x2", "tpu"), ("h200:8", "gpu")])
def test_a_missing_compiler_names_the_extra(text: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "_installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=rf"plan.compile={text}: .* pip install -r requirements/{extra}.txt"):
        topologies.prepare(topologies.parse(text))


@pytest.mark.skipif(TPU, reason="libtpu is installed")
def test_plan_without_the_compiler_ends_with_one_line(tmp_path: Path) -> None:
    done = run_main("--mode=plan", *TINY, f"--workdir={tmp_path}", "--config.plan.compile=v5p:4x4x4")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "pip install -r requirements/tpu.txt" in done.stderr


def options(**values: object) -> configs.Config:
    """Returns the default config with other values, given as section__option."""
    config = configs.default_config("2L-2L")
    with config.unlocked():
        for name, value in values.items():
            section, option = name.split("__")
            config[section][option] = value
    return configs.from_config_dict(config)


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the devices of v5e:2x2."""

    class Device:
        def __init__(self, number: int) -> None:
            self.id, self.process_index, self.platform, self.device_kind = number, 0, "cpu", "absent"

    monkeypatch.setattr(topologies, "absent_devices", lambda target: list(map(Device, range(target.count))))


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"plan__device": "v5p"}, "plan.device=v5p contradicts plan.compile=v5e:2x2, which has 4 x v5e"),
        ({"plan__devices": 8}, "plan.devices=8 contradicts plan.compile=v5e:2x2"),
        ({"plan__calibrate": True}, "plan.calibrate measures this machine"),
        ({"parallel__model": 3}, "does not match the 4 devices"),
        ({"parallel__data": 2}, "does not match the 4 devices"),
    ],
    ids=str,
)
def test_options_that_do_not_match_the_absent_devices(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compiled.planned_for(options(**values), topologies.parse("v5e:2x2"))


def test_the_report_is_readable() -> None:
    part = {"executions": 12, "inside_bytes": 3e6, "between_bytes": 5e5}
    report = {
        "target": "v5e:2x2:x2", "mesh": {"data": 4, "model": 2}, "remat": "full", "rows": 64, "row_length": 128,
        "seconds": 61.0, "versions": {"libtpu": "1"},
        "peak_bytes": 2e9, "argument_bytes": 5e8, "temporary_bytes": 1.5e9,
        "networks": {"inside": "ICI", "between": "DCN"}, "collectives": {"all-reduce": part},
        "largest_collectives": [{"kind": "all-reduce", "loops": ["while.3 x 6"], "name": "a/b/c/d", **part}],
        "unknown_loops": ["while.9"],
        "largest_arrays": [{"bytes": 4e6, "number": 3, "array": "f32[6,8]", "argument": False, "name": "a/b/c/d"}],
    }  # fmt: skip
    text = compiled.format_report(report, 1.5e9)
    for words in (
        "compiled for v5e:2x2:x2 (data 4, model 2) with model.remat=full",
        "peak per device 2.000 GB by the compiler (the plan: 1.500)",
        "all-reduce                    12         3.000         0.500  b/c/d in while.3 x 6",
        "counted once, because the number of iterations is unknown: while.9",
        "f32[6,8]                         3       4.000  b/c/d, ...",
    ):
        assert words in text
    failed = {name: report[name] for name in ("target", "mesh", "remat", "rows", "row_length", "seconds", "versions")}
    assert "does not fit; the compiler says: too large" in compiled.format_report(failed | {"error": "too large"}, 1e9)


def needs(installed: bool, name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not installed, reason=f"needs {name}: pip install -r requirements/{name}.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "data", "model"),
    [
        pytest.param("v5e:2x2", 2, 2, marks=needs(TPU, "tpu")),
        pytest.param("h200:2x2", 2, 2, marks=needs(CUDA, "gpu")),
    ],
)
def test_plan_for_absent_devices(target: str, data: int, model: int, tmp_path: Path) -> None:
    """The compiler's memory holds the state; the gradients are summed over data, and activations over model."""
    text = tmp_path / "program.txt"
    done = run_main(
        "--mode=plan", *TINY, "--config.model.remat=full", "--config.train.ema_decay=0.9", f"--workdir={tmp_path}",
        f"--config.plan.compile={target}", f"--config.parallel.model={model}", f"--config.plan.program={text}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    report = plan["compiled"]
    assert f"compiled for {target} (data {data}, model {model})" in done.stdout
    assert report["mesh"] == {"data": data, "fsdp": 1, "model": model}
    assert plan["devices"] == data * model
    assert plan["state_bytes"] / model < report["peak_bytes"]
    assert report["argument_bytes"] + report["temporary_bytes"] <= report["peak_bytes"]
    assert report["unknown_loops"] == []
    # The devices that share rows, and those that share matrices.
    assert {((0, 2), (1, 3)), ((0, 1), (2, 3))} <= {c.groups for c in collectives(parse(text.read_text()))}
    sums = report["collectives"].values()
    # The gradients of all parameters are summed over the two hosts, at least once and hardly more than that.
    between = sum(part["between_bytes"] for part in sums)
    assert between == 0 if target.startswith("v5e") else 0.9 < between / (plan["gradient_bytes"] / model) < 1.3
