"""Grids of training runs: flags, the loop over epochs, and a table of results.

An experiment describes a run by a frozen dataclass. Each field becomes a flag, which takes one or more values separated
by commas; the grid consists of all combinations. The table is a file with one JSON object per finished run. Runs that
the table contains are not repeated.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.measure import machine
from branchnorm_jax.analysis import figures
from branchnorm_jax.errors import BranchNormError, UserError
from branchnorm_jax.training.logs import environment, say
from experiments.cifar import Images, Split, augment, batches, digest, load

Run = TypeVar("Run")
Row = dict[str, Any]

TARGET = 0.8
"""Training accuracy of `epochs_to_target`."""


class Epoch(NamedTuple):
    """The state after an epoch, and the mean loss and accuracy of its batches, each before the update with it."""

    state: Any
    loss: float
    accuracy: float


def fit(
    update: Callable[[Any, Split], tuple[Any, jax.Array]],
    state: Any,
    data: Split,
    *,
    epochs: int,
    batch: int,
    seed: int,
    augmented: bool = False,
) -> Iterator[Epoch]:
    """Trains, and yields after each epoch. Stops after an epoch with a loss that is not finite.

    Args:
      update: (state, batch) -> new state and [mean loss, accuracy] of the batch.
      state: initial state; `update` may reuse its memory.
      data: the training images.
      epochs: number of epochs.
      batch: images per update.
      seed: determines the order and the augmentation of the images.
      augmented: whether to flip and crop the images.

    Raises:
      UserError: if there are fewer images than one batch has.
    """
    if batch > len(data.labels):
        raise UserError(f"--batch={batch}: there are only {len(data.labels)} training images")
    for epoch in range(epochs):
        rng, figures = np.random.default_rng((seed, epoch)), []
        for images, labels in batches(data, batch, rng):
            state, figure = update(state, Split(augment(images, rng) if augmented else images, labels))
            figures.append(figure)
        loss, accuracy = map(float, np.array(jax.device_get(figures), np.float64).mean(0))
        yield Epoch(state, loss, accuracy)
        if not math.isfinite(loss):
            return


def summary(losses: Sequence[float], accuracies: Sequence[float]) -> Row:
    """Returns the columns of a training curve. JSON has no infinity, so a loss that is not finite is None."""
    reached = (epoch + 1 for epoch, accuracy in enumerate(accuracies) if accuracy >= TARGET)
    return {
        "status": "done" if math.isfinite(losses[-1]) else "diverged",
        "epochs_to_target": next(reached, None),
        "train_loss": [float(f"{loss:.5g}") if math.isfinite(loss) else None for loss in losses],
        "train_accuracy": [round(accuracy, 4) for accuracy in accuracies],
    }


def read(table: Path, fields: Collection[str]) -> list[Row]:
    """Returns the rows of a table; a missing table has none.

    A kill can leave an unfinished last line, which is ignored.

    Args:
      table: the file.
      fields: names of the fields of a run, in their order.

    Raises:
      UserError: if the file is something else than a table of such runs.
    """
    begin = '{"' + next(iter(fields)) + '":'
    try:
        *lines, rest = table.read_text(encoding="utf-8").split("\n") if table.exists() else [""]
        rows = [json.loads(line) for line in lines]
        known = all(row.keys() >= {*fields} for row in rows) and begin.startswith(rest[: len(begin)])
    except (OSError, ValueError, AttributeError):
        known = False
    if not known:
        raise UserError(f"{table}: this is not a table of this experiment; choose another --table")
    return rows


def append(table: Path, row: Row) -> None:
    """Adds a row to a table, in place of an unfinished last line."""
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")


def run_all(grid: Sequence[Any], table: Path, train: Callable[[Any], Row], data: str) -> None:
    """Trains the runs that the table does not contain, and adds each to it.

    Args:
      grid: the runs.
      table: the file.
      train: trains one run, returns the columns of its results.
      data: what the runs are trained on; the same for all rows of a table. (Rows of earlier versions do not say.)

    Raises:
      UserError: if the table has results of other data.
    """
    for run in tqdm(grid, desc="runs", disable=len(grid) < 2):
        fields = dataclasses.asdict(run)
        rows = read(table, fields)
        if any(row.get("data", data) != data for row in rows):
            raise UserError(f"{table}: its results are from other images; choose another --table")
        if any(all(row[name] == value for name, value in fields.items()) for row in rows):
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        results = train(run)
        results["seconds"] = round(time.perf_counter() - wall, 1)
        results["cpu_seconds"] = round(time.process_time() - cpu, 1)
        append(table, fields | {"data": data} | results | machine() | environment())
        say(" ".join(f"{name}={value}" for name, value in fields.items()) + f": {describe(results)}")


def describe(results: Row) -> str:
    """Returns a result in a few words."""
    last = results["train_loss"][-1]
    reached = results["epochs_to_target"]
    return (
        f"{results['status']}, training loss {last}, "
        + (f"{TARGET:.0%} after {reached} epochs" if reached else f"{TARGET:.0%} not reached")
        + f", test accuracy {results['test_accuracy']:.1%}, {results['cpu_seconds']} CPU seconds"
    )


def command(
    kind: type[Run],
    document: str | None,
    table: str,
    train: Callable[[Run, Images], Row],
    draw: Callable[[list[Row], Path], None],
    argv: Sequence[str] | None = None,
) -> None:
    """Runs an experiment from the command line.

    Args:
      kind: the dataclass of a run. A field may have its allowed values as metadata `choices`.
      document: the help text.
      table: file of the table by default.
      train: trains one run, returns the columns of its results.
      draw: draws the figures of a table to files that begin with a path.
      argv: the arguments; by default those of the process.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="npz file with x_train, y_train, x_test, y_test, or tfds; without, only draws")
    parser.add_argument("--table", type=Path, default=Path(table), help=f"file of the results ({table})")
    parser.add_argument("--figures", type=Path, help="where to draw: docs/x draws docs/x_loss.png, ... (as the table)")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    for field in fields:
        choices = field.metadata.get("choices", ())
        text = f"{', '.join(choices) or type(field.default).__name__}; one or more ({field.default})"
        parser.add_argument(f"--{field.name}", type=_values(field, choices), default=[field.default], help=text)
    arguments = parser.parse_args(argv)
    points = itertools.product(*(getattr(arguments, field.name) for field in fields))
    try:
        if arguments.data:
            images = load(arguments.data)
            grid = [kind(*point) for point in points]
            run_all(grid, arguments.table, lambda run: train(run, images), digest(images))
        rows = read(arguments.table, [field.name for field in fields])
        if not rows:
            raise UserError(f"{arguments.table}: there are no results yet; give --data=<npz file> or --data=tfds")
        draw(rows, arguments.figures or arguments.table.with_suffix(""))
    except BranchNormError as error:
        sys.exit(_report(error))


def _report(error: BranchNormError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _values(field: Any, choices: Sequence[str]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        values = [type(field.default)(value) for value in text.split(",")]
        for value in values:
            if choices and value not in choices:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}")
            # Counts are positive, except for the seed; rates may be 0.
            if not choices and not (value > 0 or (value == 0 and (not field.default or isinstance(value, float)))):
                raise argparse.ArgumentTypeError(f"{value} is too small")
        return values

    parse.__name__ = field.name
    return parse


def save_figure(figure: Any, legend: Any, path: Path) -> None:
    """Writes a figure, with the legend of the axis `legend` if there is one, and closes it."""
    if legend is not None:
        handles, labels = legend.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    figures.pyplot().close(figure)
