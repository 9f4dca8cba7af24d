"""Loading a trained run: its vocabulary, network and parameters."""

import dataclasses
from typing import NamedTuple

from jax.sharding import Mesh

from branchnorm_jax import config as configs
from branchnorm_jax.data.tokenizer import Tokenizer, load_tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.network import make_model
from branchnorm_jax.training.state import abstract_params
from branchnorm_jax.workdir import Workdir, runs_near


def refuse_sweep(config: Config, workdir: Workdir) -> None:
    """Raises `UserError` if the workdir is the folder of a sweep, whose runs are in folders of their own."""
    if config.sweep.grid and (workdir / "config.json").exists() and not workdir.has_checkpoints:
        raise UserError(f"{workdir.path}: the folder of a sweep; name the folder of one of its runs")


def network(config: Config, workdir: Workdir) -> tuple[Tokenizer, Transformer]:
    """Loads the vocabulary and builds the network of a run.

    Raises:
      UserError: if the workdir has no run, or if its vocabulary is not the one that the run was trained with.
    """
    if not (workdir / "config.json").exists():
        near = runs_near(workdir.path)
        raise UserError(f"{workdir.path}: no training run in this workdir; train first (--mode=train){near}")
    refuse_sweep(config, workdir)
    tokenizer = load_tokenizer(workdir / "vocabulary")
    if tokenizer.sha256 != workdir.data_identity().get("vocabulary"):
        raise UserError(
            f"{workdir / 'vocabulary'}: not the vocabulary that this run was trained with, according to data.json; "
            f"restore it, or data.json if that is damaged"
        )
    return tokenizer, make_model(config.model, tokenizer)


class Restored(NamedTuple):
    """A checkpoint of a run, with its vocabulary and network."""

    tokenizer: Tokenizer
    model: Transformer
    params: Params
    alpha: Alpha
    step: int


def restore(config: Config, workdir: Workdir) -> Restored:
    """Restores the checkpoint `decode.checkpoint` of a run; see `network` and `restore_model` for the errors."""
    tokenizer, model = network(config, workdir)
    return Restored(tokenizer, model, *restore_model(config, workdir, model, config.decode.checkpoint))


def restore_model(
    config: Config, workdir: Workdir, model: Transformer, which: str, mesh: Mesh | None = None
) -> tuple[Params, Alpha, int]:
    """Restores the parameters, alpha and step from a checkpoint of the run or from its "average".

    The parameters are split over `mesh`; by default only `parallel.model` splits them.

    Raises:
      UserError: if there is no such checkpoint.
    """
    checkpoints, name = open_checkpoints(config, workdir, which)
    if mesh is None:
        # The run may have had other devices.
        mesh = make_mesh(dataclasses.replace(config.parallel, data=0, fsdp=1))
    return checkpoints.restore_params(name, abstract_params(model, mesh))


def open_checkpoints(config: Config, workdir: Workdir, which: str) -> tuple[Checkpoints, str]:
    """Opens the folder with the checkpoint `which`.

    Returns:
      The checkpoints in the folder, and the name of the checkpoint in that folder.

    Raises:
      UserError: if `which` is "average" and there is no average.
    """
    averaged = which == "average"
    if averaged:
        workdir.fetch("average")
    folder = workdir / "average" if averaged else workdir.stored("checkpoints")
    if averaged and not folder.exists():
        raise UserError(f"{workdir.path}: no average of checkpoints; make it with --mode=average")
    return Checkpoints(folder, config.train, logs.say, read_only=True), "last" if averaged else which


def find_run(option: str, name: str, config: Config) -> tuple[Config, Workdir, str]:
    """Finds the run that an option names as "workdir" (the best checkpoint) or "workdir:checkpoint".

    Returns:
      The config of the run, with the `parallel` options of `config` instead of its own; the workdir; the name of the
      checkpoint.

    Raises:
      UserError: if the option names no run, or if the folder has no run.
    """
    folder, colon, which = name.rpartition(":")
    if not colon or "/" in which:  # The colon of a URL separates nothing.
        folder, which = name, ""
    if not folder:
        raise UserError(f"{option}={name}: no workdir given; write workdir or workdir:checkpoint")
    workdir = Workdir.open(folder)
    if not (workdir / "config.json").exists():
        raise UserError(f"{option}: {folder}: no training run in this folder{runs_near(workdir.path)}")
    theirs = dataclasses.replace(configs.load(workdir / "config.json"), parallel=config.parallel)
    return theirs, workdir, which or "best"
