"""Search with a model that several devices share."""

import json
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.decoding.engine import Engine, Query
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig, ModelConfig, ParallelConfig
from branchnorm_jax.parallel.mesh import make_mesh, shard_tree
from branchnorm_jax.tokens import EOS
from tests.conftest import output_of

SEARCHES = """
import json
from branchnorm_jax.options import ParallelConfig
from tests.decoding.test_mesh import searched
print(json.dumps([searched(ParallelConfig(model={devices}), 1), searched(ParallelConfig(fsdp={devices}), 2)]))
"""


def searched(parallel: ParallelConfig, unroll: int) -> dict[str, Any]:
    """Translates five sentences in batches of two; the devices divide the parameters among them."""
    compiled: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        compiled.extend(re.findall(r"Finished XLA compilation of jit\((begin|run)\)", record.getMessage()))
        return False

    model = Transformer(
        ModelConfig(encoder_layers=1, decoder_layers=2, width=32, ffn_width=16, heads=4, dropout=0.0), 40, 40
    )
    mesh = make_mesh(parallel)
    params = jax.tree.map(lambda leaf: 2.0 * leaf, jax.jit(model.init)(jax.random.key(0)))
    params = jax.device_put(params, shard_tree(mesh, params, model.logical_axes()))
    config = DecodeConfig(beam_size=3, batch_tokens=2 * 3 * 16, max_length_b=5, unroll=unroll, streams=1)
    engine = Engine((model,), config)
    rng = np.random.default_rng(0)
    texts = [Query([*rng.integers(3, 40, 4 + number).tolist(), EOS], number) for number in range(5)]
    logger = logging.getLogger("jax._src.dispatch")
    logger.addFilter(note)
    with jax.log_compiles():
        found = dict(engine.search(((params, jnp.float32(1)),), texts))
    logger.removeFilter(note)
    return {
        "tokens": [found[index].tokens.tolist() for index in range(5)],
        "scores": [found[index].scores.tolist() for index in range(5)],
        "compiled": sorted(compiled),
    }


def test_devices_that_share_a_model_find_what_one_finds() -> None:
    def searches(devices: int) -> list[dict[str, Any]]:
        output = output_of(
            SEARCHES.format(devices=devices),
            devices,
            JAX_ENABLE_COMPILATION_CACHE="false",
            JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        )
        return json.loads(output.splitlines()[-1])

    for theirs, ours in zip(searches(1), searches(2), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        np.testing.assert_allclose(ours["scores"], theirs["scores"], rtol=1e-5)
        assert ours["compiled"] == theirs["compiled"] == ["begin", "run"]
