"""Images, tables of results, and the command line of the experiments."""

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds

from branchnorm_jax.errors import UserError
from experiments import deep_mlp, resnet, runs
from experiments.cifar import Split, augment, batches, load


@dataclasses.dataclass(frozen=True)
class Toy:
    """A run without a network."""

    depth: int = 1
    rate: float = 0.5


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    """A data set of random images."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 30), ("test", 20)):
        arrays[f"x_{split}"] = rng.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 10
    np.savez(tmp_path / "images.npz", **arrays)
    return tmp_path / "images.npz"


def test_images_are_standardised_by_the_training_split(npz: Path) -> None:
    train, test = load(str(npz))
    np.testing.assert_allclose(train.images.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(train.images.var((0, 1, 2), dtype=np.float64), 1, rtol=1e-5)
    with np.load(npz) as arrays:
        x = arrays["x_train"].astype(np.float64)
        expected = (arrays["x_test"] - x.mean((0, 1, 2))) / x.std((0, 1, 2))
    np.testing.assert_allclose(test.images, expected, atol=1e-5)
    assert train.labels.dtype == np.int32 and list(test.labels) == [*range(10)] * 2


def test_images_from_tensorflow_datasets() -> None:
    with tfds.testing.mock_data(num_examples=5):
        train, test = load("tfds")
    assert train.images.shape == test.images.shape == (5, 32, 32, 3)
    assert train.labels.shape == (5,) and set(train.labels) <= set(range(10))


@pytest.mark.parametrize("fault", ["missing", "text", "array", "shape", "classes", "empty"])
def test_faulty_data_is_one_line(npz: Path, fault: str) -> None:
    path = npz.with_name("other.npz")
    if fault == "text":
        path.write_text("no arrays")
    elif fault == "array":
        np.savez(path, x_train=np.zeros((2, 32, 32, 3), np.uint8))
    elif fault == "shape":
        np.savez(path, x_train=np.zeros((2, 28, 28), np.uint8), y_train=np.zeros(2))
    elif fault == "classes":
        np.savez(path, x_train=np.zeros((2, 32, 32, 3), np.uint8), y_train=np.array([3, 10]))
    elif fault == "empty":
        np.savez(path, x_train=np.zeros((0, 32, 32, 3), np.uint8), y_train=np.zeros(0))
    with pytest.raises(UserError, match=r"^--data=.*other\.npz: .*[xy]_train.*$"):
        load(str(path))


def test_an_epoch_contains_every_image_once_but_the_rest() -> None:
    split = Split(np.arange(10)[:, None], np.arange(10))
    chosen = [batch.labels for batch in batches(split, 3, np.random.default_rng(0))]
    assert [len(labels) for labels in chosen] == [3, 3, 3]
    assert len(set(np.concatenate(chosen))) == 9


def test_batch_larger_than_the_data_is_refused() -> None:
    split = Split(np.zeros((30, 32, 32, 3)), np.arange(30))
    with pytest.raises(UserError, match=r"^--batch=31: there are only 30 training images$"):
        next(runs.fit(lambda state, batch: (state, jnp.zeros(2)), None, split, epochs=1, batch=31, seed=0))


def test_augmented_images_are_shifted_and_flipped_copies() -> None:
    rng = np.random.default_rng(1)
    images = rng.normal(size=(40, 32, 32, 3)).astype(np.float32)
    seen = set()
    for image, changed in zip(images, augment(images, rng), strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        found = [
            (row, column, flip)
            for row in range(9)
            for column in range(9)
            for flip in (1, -1)
            if np.array_equal(padded[row : row + 32, column : column + 32][:, ::flip], changed)
        ]
        assert len(found) == 1
        seen.update(found)
    assert {flip for *_, flip in seen} == {1, -1}
    assert len({row for row, *_ in seen}) > 5 and len({column for _, column, _ in seen}) > 5


def test_finished_rows_are_not_run_again(tmp_path: Path) -> None:
    """A kill may leave half a line: only that run is repeated."""
    table, trained = tmp_path / "new" / "table.jsonl", []

    def train(run: Toy) -> runs.Row:
        trained.append(run)
        return runs.summary([2.0, run.rate], [0.5, 0.9]) | {"test_accuracy": 0.25}

    grid = [Toy(1), Toy(2), Toy(2, 0.25)]
    runs.run_all(grid, table, train, "a")
    first = table.read_bytes()
    assert trained == grid
    runs.run_all(grid, table, train, "a")
    assert trained == grid and table.read_bytes() == first
    table.write_bytes(first[:-9])
    runs.run_all([*grid, Toy(3)], table, train, "a")
    rows = runs.read(table, ["depth", "rate"])
    assert trained == [*grid, Toy(2, 0.25), Toy(3)]
    assert [(row["depth"], row["rate"]) for row in rows] == [(1, 0.5), (2, 0.5), (2, 0.25), (3, 0.5)]
    assert rows[0]["epochs_to_target"] == 2 and rows[0]["train_loss"] == [2.0, 0.5]
    assert rows[0].keys() >= {"seconds", "cpu_seconds", "machine", "date", "versions", "git_revision"}
    with pytest.raises(UserError, match="from other images"):
        runs.run_all(grid, table, train, "b")


@pytest.mark.parametrize(
    "text", ["my only notes", "a,b\n1,2\n", '{"width": 3}\n', "3\n", '{"name": "mine"}', "{my notes"]
)
def test_other_files_are_no_tables(tmp_path: Path, text: str) -> None:
    table = tmp_path / "notes.txt"
    table.write_text(text)
    with pytest.raises(UserError, match="not a table"):
        runs.run_all([Toy(1)], table, lambda run: {}, "a")
    assert table.read_text() == text


def test_command_trains_a_grid_and_draws_it(npz: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    small = ("--width=8", "--batch=10", "--epochs=2", f"--data={npz}", f"--table={table}")
    deep_mlp.main([*small, "--method=rezero,residual", "--depth=3"])
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [(row["method"], row["depth"], row["width"]) for row in rows] == [("rezero", 3, 8), ("residual", 3, 8)]
    for name in ("table_loss.png", "table_epochs.png", "table_jacobian.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        (deep_mlp, ("--method=rezro",), "argument --method: 'rezro' is not one of vanilla, residual"),
        (deep_mlp, ("--depth=8,0",), "argument --depth: 0 is too small"),
        (deep_mlp, ("--data=",), "table.jsonl: there are no results yet; give --data="),
        (resnet, ("--depth=21",), "--depth=21: give 6 n + 2 layers, such as 20"),
    ],
)
def test_mistakes_are_one_line(
    npz: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    experiment: ModuleType,
    options: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        experiment.main([f"--data={npz}", f"--table={tmp_path / 'table.jsonl'}", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
