"""Measures the fill and the shapes of batches, and checks that each pair occurs once per epoch.

    python -m benchmarks.batches --config=multi30k_ende --path=<folder>
    python -m benchmarks.batches --config=text --path=<folder> --langs=en-fr --tokens=4096
    python -m benchmarks.batches --config=multi30k_ende --path=<folder> --power-of-two-rows

The folder is the data.path of the config. The fill is the number of tokens divided by the number of computed positions,
over both sides. The best published fill for translation is 91.3 %.
"""

import argparse
import importlib
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import save
from branchnorm_jax.config import from_config_dict
from branchnorm_jax.data.batches import make_plans
from branchnorm_jax.data.prepare import prepare


def main() -> None:
    """Measures two epochs of the config that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="multi30k_ende")
    parser.add_argument("--path", required=True)
    parser.add_argument("--langs", default="en-de")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--power-of-two-rows", action="store_true")
    arguments = parser.parse_args()
    options = importlib.import_module(f"configs.{arguments.config}").get_config()
    options.data.path = arguments.path
    options.data.source_lang, options.data.target_lang = arguments.langs.split("-")
    options.train.batch_tokens = arguments.tokens
    options.data.power_of_two_rows = arguments.power_of_two_rows
    config = from_config_dict(options)
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(config.data, Path(folder), print)
        begin = time.perf_counter()
        plan, _ = make_plans(config.data, corpus.train, corpus.valid, arguments.tokens, 0)
        packed = time.perf_counter() - begin
        figures = {}
        for epoch in (0, 1):
            begin, seen, tokens, positions = time.perf_counter(), np.zeros(len(corpus.train.lengths), int), 0, 0
            for step in range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch):
                batch = plan.batch_at(step)
                tokens += int((batch.source != 0).sum() + (batch.target != 0).sum())
                positions += batch.source.size + batch.target.size
                np.add.at(seen, np.concatenate(plan.ids_at(step)[1]), 1)
            assert (seen == 1).all(), "each pair must occur exactly once per epoch"
            figures[f"fill_epoch_{epoch}"] = tokens / positions
            figures[f"seconds_per_batch_epoch_{epoch}"] = (time.perf_counter() - begin) / plan.batches_per_epoch
        used = [shape for shape, rows in zip(plan.shapes, plan.rows, strict=True) if rows]
        save(
            f"batches_{Path(arguments.path).name}_{arguments.langs}_{arguments.tokens}"
            + ("_powers_of_two" if arguments.power_of_two_rows else ""),
            figures
            | {
                "pairs": len(corpus.train.lengths),
                "shapes": [list(shape) for shape in used],
                "compiled_shapes": len(used),
                "batches_per_epoch": plan.batches_per_epoch,
                "packing_seconds": packed,
            },
        )


if __name__ == "__main__":
    main()
