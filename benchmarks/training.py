"""Measures training throughput on real text with our, PyTorch's and Flax's layers.

    python -m benchmarks.training --path=<folder of {train,valid}.{en,de}> --size=small     4L-4L of width 128
    python -m benchmarks.training --path=<folder of {train,valid}.{en,de}> --size=base      6L-6L of width 512

Text, vocabulary and options are those of configs/multi30k_ende.py. All systems train the same model in float32 on the
same cores, with updates of at most `batch_tokens` positions on the larger side:

  ours      the update of the training loop, on its batches: rows of several sentences, in a few shapes
  pytorch   nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, eager, fused AdamW; as in fairseq, sentences
            are sorted by length, and a batch is padded to its longest
  packed    linen layers in a Python loop, whole logits, one-hot targets, jitted; as in Flax's WMT example, rows have
            256 positions, and the next sentence goes into the same row if it fits
  padded    the same with one sentence per row, padded to the longest allowed sentence (64, data.max_length)

Before the timing, the benchmark checks that all systems give the same loss for one batch, without dropout and with the
same parameters. Each system trains on some batches of an epoch, evenly spread over shapes or lengths. A round is one
pass of every system over its own batches. Throughput counts target tokens with EOS and without padding.

PyTorch's threads spin while they wait for each other. On a machine that is not idle, PyTorch is ten times faster with
OMP_WAIT_POLICY=passive in the environment. The results record the policy.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from benchmarks import flax_model
from benchmarks.measure import in_turn, save
from benchmarks.torch_model import Network
from branchnorm_jax.config import from_config_dict
from branchnorm_jax.data.batches import TextBatch, fill_rows, make_plans
from branchnorm_jax.data.mixture import Mixture
from branchnorm_jax.data.packing import Shape
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.shuffle import shuffled
from branchnorm_jax.data.store import TokenStore
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.tokens import PAD
from branchnorm_jax.training.network import make_model
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, first_state
from branchnorm_jax.training.step import loss_sums, make_train_step
from configs.multi30k_ende import get_config

T = TypeVar("T")
PACKED = 256
"""Positions per row in Flax's WMT example (max_target_length)."""


class Size(NamedTuple):
    """A model and the length of its measurement."""

    model: dict[str, Any]
    batch_tokens: int
    updates: int
    """Number of updates of each system per round."""


SIZES = {
    "small": Size({}, 2048, 12),
    "base": Size(dict(encoder_layers=6, decoder_layers=6, width=512, ffn_width=2048, heads=8, dropout=0.1), 4096, 2),
}


def config_of(size: Size, path: str) -> Config:
    """Returns configs/multi30k_ende.py with the model of this size."""
    values = get_config()
    values.data.path, values.train.batch_tokens = path, size.batch_tokens
    values.model.update(size.model)
    return from_config_dict(values)


# Batches


def spread(items: Sequence[T], count: int) -> list[T]:
    """Returns `count` items, evenly spread from first to last."""
    return [items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count)]


def our_batches(config: Config, store: Mixture, valid: Sequence[TokenStore], count: int) -> list[TextBatch]:
    """Returns our batches, from the first epoch."""
    plan, _ = make_plans(config.data, store, valid, config.train.batch_tokens, config.train.seed)
    steps = sorted(range(plan.batches_per_epoch), key=lambda step: plan.ids_at(step)[0])
    return [plan.batch_at(step) for step in spread(steps, count)]


def sorted_batches(store: Mixture, batch_tokens: int, count: int) -> list[TextBatch]:
    """Returns batches of sentences with similar lengths and at most `batch_tokens` positions."""
    order = np.lexsort(store.lengths.T[::-1])  # by source, then by target
    batches: list[list[int]] = [[]]
    longest = 0
    for index, length in zip(order.tolist(), store.lengths[order].max(1).tolist(), strict=True):
        longest = max(longest, length)
        if longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = length
        batches[-1].append(index)
    return [one_a_row(store, ids, *store.lengths[ids].max(0).tolist()) for ids in spread(batches, count)]


def padded_batches(store: Mixture, length: int, batch_tokens: int, count: int) -> list[TextBatch]:
    """Returns batches of sentences in random order, each padded to `length`."""
    rows = batch_tokens // length
    order = shuffled(np.arange(len(store.lengths)), 0)
    return [one_a_row(store, order[at : at + rows].tolist(), length, length) for at in range(0, count * rows, rows)]


def one_a_row(store: Mixture, ids: list[int], source: int, target: int) -> TextBatch:
    """Returns a batch with one sentence per row."""
    return fill_rows(store, [np.array([index]) for index in ids], Shape(len(ids), source, target))


def packed_batches(store: Mixture, length: int, batch_tokens: int, count: int) -> list[TextBatch]:
    """Returns batches of sentences in random order; a row takes sentences while they fit."""
    shape = Shape(batch_tokens // length, length, length)
    rows: list[list[int]] = [[]]
    room = np.full(2, length)
    for index in shuffled(np.arange(len(store.lengths)), 0).tolist():
        if (store.lengths[index] > room).any():
            rows.append([])
            room = np.full(2, length)
        rows[-1].append(index)
        room = room - store.lengths[index]
    starts = range(0, count * shape.rows, shape.rows)
    return [fill_rows(store, [np.array(row) for row in rows[at : at + shape.rows]], shape) for at in starts]


# Systems: each is a function that makes one update per batch


def run_jax(step: Callable[[Any, Batch], tuple[Any, Any]], batches: list[TextBatch], start: Any) -> Callable[[], Any]:
    """Returns a function that applies `step` to all batches; each call continues from the last state."""
    update = jax.jit(step, donate_argnums=0)
    given, state = [Batch(*map(jnp.asarray, batch)) for batch in batches], start

    def run() -> Any:
        nonlocal state
        for batch in given:
            state, metrics = update(state, batch)
        return metrics

    return run


def run_flax(config: Config, params: Any, vocabulary: int, batches: list[TextBatch]) -> Callable[[], Any]:
    """Returns a function that trains the Flax model on all batches."""
    c = config.train
    network = flax_model.Network(config.model, vocabulary, train=True)
    adam = optax.adamw(c.learning_rate, c.adam_b1, c.adam_b2, c.adam_eps, weight_decay=c.weight_decay)

    def step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        number, params, opt_state = state
        key = jax.random.fold_in(jax.random.key(0), number)
        differentiate = jax.value_and_grad(
            lambda params: flax_model.loss(network, params, *batch, c.label_smoothing, key)
        )
        value, grads = differentiate(params)
        updates, opt_state = adam.update(grads, opt_state, params)
        return (number + 1, optax.apply_updates(params, updates), opt_state), value

    params = flax_model.converted(params, config.model.heads)
    return run_jax(step, batches, (jnp.int32(0), params, adam.init(params)))


def run_torch(network: Network, config: Config, batches: list[TextBatch]) -> Callable[[], float]:
    """Returns a function that trains the PyTorch model on all batches, in eager mode."""
    c = config.train
    adam = torch.optim.AdamW(
        network.parameters(), c.learning_rate, (c.adam_b1, c.adam_b2), c.adam_eps, c.weight_decay, fused=True
    )
    given = [[torch.from_numpy(side).long() for side in batch] for batch in batches]
    network.train()

    def run() -> float:
        for source, target in given:
            adam.zero_grad(set_to_none=True)
            loss = network.loss(source, target, c.label_smoothing)
            loss.backward()
            adam.step()
        return loss.item()

    return run


def losses(config: Config, model: Transformer, params: Any, network: Network, batch: TextBatch) -> dict[str, float]:
    """Returns the loss of a batch in each implementation, without dropout."""
    smoothing, words = config.train.label_smoothing, model.target_vocab
    here = Batch(*map(jnp.asarray, batch))
    source, target = (torch.from_numpy(side).long() for side in batch)
    sums, _ = loss_sums(model, params, here, jnp.float32(1), smoothing)
    flax = flax_model.Network(config.model, words, train=False)
    theirs = flax_model.converted(params, config.model.heads)
    with torch.no_grad():
        return {
            "ours": float(sums.loss / sums.tokens),
            "pytorch": float(network.eval().loss(source, target, smoothing)),
            "flax": float(flax_model.loss(flax, theirs, *here, smoothing, jax.random.key(0))),
        }


def measure(size: Size, path: str, rounds: int) -> dict[str, Any]:
    """Measures all systems in turn."""
    config = config_of(size, path)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(config.data, Path(folder), print)
        store, tokens, longest = corpus.train, size.batch_tokens, config.data.max_length
        batches = {
            "ours": our_batches(config, store, corpus.valid, size.updates),
            "pytorch": sorted_batches(store, tokens, size.updates),
            "packed": packed_batches(store, PACKED, tokens, size.updates),
            "padded": padded_batches(store, longest, tokens, size.updates),
        }
    model, optimizer = make_model(config.model, corpus.tokenizer), make_optimizer(config.train, config.model)
    start = jax.jit(lambda: first_state(model.init(jax.random.key(0)), optimizer))
    params = start().params
    network = Network(config.model, model.target_vocab)
    network.load(params)
    checked = losses(config, model, params, network, batches["pytorch"][0])
    difference = max(checked.values()) - min(checked.values())
    assert difference < 1e-4 * checked["ours"], f"the models differ: losses {checked}"
    systems: dict[str, Callable[[], Any]] = {
        "ours": run_jax(make_train_step(model, optimizer, config), batches["ours"], start()),
        "pytorch": run_torch(network, config, batches["pytorch"]),
        "packed": run_flax(config, params, model.target_vocab, batches["packed"]),
        "padded": run_flax(config, start().params, model.target_vocab, batches["padded"]),
    }
    times = dict(zip(systems, in_turn(list(systems.values()), rounds), strict=True))
    real = {name: sum(int((batch.target != PAD).sum()) for batch in given) for name, given in batches.items()}
    speeds = {name: [real[name] / seconds for seconds in times[name]] for name in systems}
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    c = config.model
    results: dict[str, Any] = {
        "model": f"{c.depth}, width {c.width}/{c.ffn_width}, {c.heads} heads",
        "vocabulary": model.target_vocab,
        "dropout": c.dropout,
        "batch_tokens": tokens,
        "threads": threads,
        "torch": torch.__version__,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "active"),
        "updates_a_round": size.updates,
        "losses": checked,
    }
    for name in systems:
        sides = [side for batch in batches[name] for side in batch]
        fill = sum(int((side != PAD).sum()) for side in sides) / sum(side.size for side in sides)
        results |= {
            f"{name}_tokens_per_second": medians[name],
            f"{name}_seconds_per_update": statistics.median(times[name]) / size.updates,
            f"{name}_target_tokens_per_update": real[name] / size.updates,
            f"{name}_fill": fill,
        }
    for name in list(systems)[1:]:
        ratios = [a / b for a, b in zip(speeds["ours"], speeds[name], strict=True)]
        results |= {
            f"ours_over_{name}_of_medians": medians["ours"] / medians[name],
            f"ours_over_{name}_median_of_ratios": statistics.median(ratios),
        }
    return results | {f"{name}_seconds": seconds for name, seconds in times.items()}


def main() -> None:
    """Measures one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="folder of the text")
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--updates", type=int, default=0, help="updates of each system per round; 0: the default of the size"
    )
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    size = size._replace(updates=arguments.updates or size.updates)
    save(f"training_{arguments.size}", measure(size, arguments.path, arguments.rounds))


if __name__ == "__main__":
    main()
