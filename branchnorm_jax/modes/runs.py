"""Modes that train models, and modes that examine a run before or after training."""

import contextlib
import dataclasses
import functools
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from branchnorm_jax.analysis import (
    compiled,
    devices,
    estimate,
    figures,
    methods_table,
    signal,
    sweep_results,
    topologies,
)
from branchnorm_jax.analysis import plan as planning
from branchnorm_jax.analysis import preflight as flight
from branchnorm_jax.analysis import sweep as sweeping
from branchnorm_jax.analysis.report import draw_curves, draw_factors, draw_layers
from branchnorm_jax.analysis.sweep_curves import draw as draw_runs
from branchnorm_jax.analysis.sweep_figure import draw as draw_sweep
from branchnorm_jax.config import to_json
from branchnorm_jax.data.batches import make_plans
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.documents import read_documents
from branchnorm_jax.errors import DivergedError, UnfitError, UserError, some
from branchnorm_jax.files import delete_abandoned, write_atomically
from branchnorm_jax.model import growth
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.modes.common import agree
from branchnorm_jax.modes.evaluate import evaluate
from branchnorm_jax.options import Config, DataConfig
from branchnorm_jax.parallel import hosts
from branchnorm_jax.parallel.mesh import mesh_sizes
from branchnorm_jax.training import logs, loop
from branchnorm_jax.training.finetune import corpus_of, parent_of
from branchnorm_jax.training.loop import check_names
from branchnorm_jax.training.network import make_model
from branchnorm_jax.training.state import Batch, init_params
from branchnorm_jax.training.trained import refuse_sweep, restore
from branchnorm_jax.workdir import Workdir

DOCS = Path(__file__).parent.parent.parent / "docs"
ANALYZED = 8
"""Number of sentences used to measure signals."""

BUSY = "being made by another process"
"""How a run of a sweep is that another process has claimed."""


def train(config: Config, workdir: Workdir) -> None:
    """Trains a model. Warns before the first update if the available devices may have too little memory."""
    check_names(config)
    agree(config)
    memory = least_memory()
    fitted = planning.resolve_remat(config, memory)
    if hosts.is_first() and fitted.model.remat not in ("none", config.model.remat):
        logs.say(f"model.remat={config.model.remat} selects {fitted.model.remat} for this device")
    loop.train(config, workdir, fitted.model, functools.partial(planning.warning, fitted, memory))


def least_memory() -> float:
    """Returns the usable memory of each device in bytes; of several processes that of the one with the least.

    The processes of a machine share the memory of its CPU.
    """
    machine = socket.gethostname()
    sharing = hosts.gather(machine).count(machine) if jax.default_backend() == "cpu" else 1
    return min(map(float, hosts.gather(str(devices.memory() / sharing))))


def methods(config: Config, workdir: Workdir) -> None:
    """Prints the table of all methods. In a checkout, also writes it to docs/methods.md."""
    table = methods_table.rows()
    print(methods_table.to_text(table))
    path, text = DOCS / "methods.md", methods_table.to_markdown(table)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)
        logs.say(f"wrote {path}")


def plan(config: Config, workdir: Workdir) -> None:
    """Predicts the cost of the run, prints it and writes it to plan.json.

    If `plan.compile` names absent devices, it compiles the update for them. `plan.program` names the file for the
    program.
    """
    absent = None
    if config.plan.compile not in (topologies.HERE, topologies.NONE):
        config, absent = compiled.planned_for(config, topologies.parse(config.plan.compile))
    elif config.plan.program:
        raise UserError("config: plan.program needs absent devices in plan.compile, such as v5p:4x4x4 or h200:8")
    if not (folder := Path(config.plan.program).parent).is_dir():
        raise UserError(f"config: plan.program={config.plan.program}: there is no folder {folder}")
    check_names(config, config.plan.devices)
    if config.plan.devices:
        data, *_ = mesh_sizes(config.parallel, config.plan.devices)
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, data=data))
    with logs.progress_bar(len(estimate.remat_choices(config)), 0, "choice", "plan") as bar:
        costs = planning.make_plan(config, bar.update)
    chosen = estimate.with_remat(config, costs["chosen_remat"])
    undivided = config.parallel.fsdp == config.parallel.model == 1
    if config.plan.compile == topologies.HERE and not config.plan.device and undivided:
        costs["compiled_bytes"] = estimate.compiled_bytes(chosen)
    print(planning.format_plan(config, costs))
    if absent is not None:
        logs.say(f"compiling the update for {absent.target.text}; this takes minutes")
        costs["compiled"], text = compiled.compile_update(chosen, absent)
        print(compiled.format_report(costs["compiled"], costs["peak_bytes"]))
        if config.plan.program and text:
            write_atomically(Path(config.plan.program), text)
            print(config.plan.program)
    workdir.create()
    write_atomically(workdir / "plan.json", planning.to_json(costs))


def preflight(config: Config, workdir: Workdir) -> None:
    """Makes a time lapse of the run at its real depth and a reduced width, and gives a verdict.

    Writes preflight.json and preflight.png.
    """
    check_names(config)
    workdir.create()
    corpus = corpus_of(config, workdir)
    with logs.progress_bar(0, 0, "update", "preflight") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update()

        narrow, points = flight.run_preflight(config, corpus, progress)
    verdict = flight.judge(points)
    m = narrow.model
    shape = f"{m.method} {m.depth} at width {m.width}, {flight.ROWS} rows a batch"
    write_atomically(workdir / "preflight.json", flight.to_json(narrow, verdict, points))
    written = [workdir / "preflight.json"]
    if figures.can_draw("preflight.png"):
        written.append(workdir / "preflight.png")
        flight.draw(points, written[-1], f"{shape}: {verdict.word}")
    print(flight.format_points(points))
    print(f"{shape}", f"{verdict.word}: {verdict.reason}", sep="\n")
    print(*written, sep="\n")


def analyze(config: Config, workdir: Workdir) -> None:
    """Draws the curves of the run and the signal propagation of the model.

    The model is the checkpoint of the run. If there is no checkpoint, or `analyze.methods` is set, untrained models of
    these methods (default: the method of the run) are compared instead. The text and the vocabulary are those of the
    run; they are prepared here if they are missing.
    """
    figures.pyplot()  # Imported before the measurements, so that a missing package is reported at once.
    refuse_sweep(config, workdir)
    trained = None
    if workdir.has_checkpoints and not config.analyze.methods:
        workdir.check_config(config)
        trained = restore(config, workdir)
    methods = config.analyze.names(config.model.method)
    for method in methods:
        get_recipe(method)
    for name, draw in (
        ("metrics.jsonl", draw_curves),
        ("layers.jsonl", draw_layers),
        ("layers.jsonl", draw_factors),
    ):
        if holds_lines(workdir / name):
            try:
                print(draw(workdir))
            except UserError as error:
                logs.say(str(error))
    if trained is None and not config.analyze.methods:
        logs.say(f"{workdir.path}: no checkpoint; measuring the untrained model")
    workdir.create()
    corpus = corpus_of(config, workdir)
    _, valid = make_plans(config.data, corpus.train, corpus.valid, config.train.batch_tokens, config.train.seed)
    batch = Batch(*map(jnp.asarray, valid[0].single(ANALYZED)))
    signals = {}
    for method in methods:
        begin = time.perf_counter()
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, method=method))
        if trained is not None:
            model, params, alpha = trained.model, trained.params, trained.alpha
        else:
            model = make_model(changed.model, corpus.tokenizer)
            params = init_params(model, config.train.seed, batch)
            alpha = growth.alpha(changed.model)(jnp.int32(0))
        signals[method] = signal.measure(changed, model, params, alpha, batch)
        logs.say(f"{method}: measured in {time.perf_counter() - begin:.1f} s")
    write_atomically(workdir / "signal.csv", signal.to_csv(signals))
    m = config.model
    state = "untrained" if trained is None else f"after {trained.step} updates"
    title = f"{state}, {m.depth}, width {m.width}, {batch.source.shape[0]} rows"
    signal.draw(signals, workdir / "signal.png", title)
    print(workdir / "signal.csv", workdir / "signal.png", sep="\n")


def holds_lines(path: Path) -> bool:
    """Returns whether the file exists and is not empty."""
    return path.exists() and path.stat().st_size > 0


def check_readable(data: DataConfig, split: str) -> None:
    """Reads the beginning of a split. Raises `UserError` if it cannot be read."""
    if data.source == "documents":
        next(read_documents(data, split), None)
        return
    for direction in data.validated() if split == "valid" else data.directions():
        next(iter(read_pairs(direction, split)), None)


def check_runs(runs: Mapping[str, tuple[sweeping.Run, Config]], workdir: Workdir) -> None:
    """Checks all runs of a sweep, so that a mistake in the last run is reported before the first one starts.

    Raises:
      UserError: if a run cannot start.
    """
    memory = least_memory()
    for name, (_, chosen) in runs.items():
        check_names(chosen)
        folder = workdir.child(name)
        if folder.has_checkpoints:
            folder.check_resumes(chosen)
        elif chosen.train.parent:
            try:
                parent_of(chosen, folder)
            except UserError as error:
                raise UserError(f"sweep.grid: {name}: {error}") from error
        planning.resolve_remat(chosen, memory)  # refuses a run that cannot fit


def sweep(config: Config, workdir: Workdir) -> None:
    """Trains and evaluates every run of `sweep.grid` in its own folder; resumes an interrupted sweep.

    After each run it writes sweep.csv (every run), sweep.md (the table), sweep.png and sweep_curves.png. A run that
    diverges counts as a result. A run whose options do not fit the text does not keep the others from running. Several
    processes may make the same sweep: each leaves out the runs that the others are at.

    Raises:
      UserError: before the first run, if the grid is invalid; later, if a run cannot start for another reason.
      UnfitError: at the end, if the options of a run do not fit the text.
    """
    if workdir.has_checkpoints:
        raise UserError(
            f"{workdir.path}: this is the workdir of a training run; choose another --workdir for the sweep"
        )
    runs = sweeping.plan_runs(config)
    check_runs(runs, workdir)
    for method, options in ({} if config.sweep.recommended else sweeping.left_out(runs)).items():
        named = " ".join(f"{name}={value}" for name, value in options.items())
        logs.say(f"{method} recommends {named}; a sweep applies only what its grid sets, unless sweep.recommended=True")
    drawing = figures.can_draw("sweep.png")
    corpora = {chosen.data for _, chosen in runs.values()}

    def check(*splits: str) -> None:
        for split in splits:
            for data in corpora:
                check_readable(data, split)

    hosts.first_then_others(
        lambda: check("train", "valid", "test"), lambda: check("valid", "test"), "reading the texts"
    )
    workdir.create()
    write_atomically(workdir / "config.json", to_json(config))
    refused: list[str] = []
    for number, (name, (run, chosen)) in enumerate(runs.items(), start=1):
        folder, title = workdir.child(name), f"sweep {number}/{len(runs)}:"
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(folder.claimed()) if hosts.is_first() else True
            status = hosts.gather(sweep_results.ended(folder, chosen) if ours else BUSY)[0]
            if status:
                logs.say(f"{title} skipping {name}, already {status}")
                if status != BUSY:
                    delete_abandoned(folder / "corpus")  # A start does this; a finished run is not started again.
            else:
                logs.say(f"{title} {name}")
                for option, value in sweeping.recommended(config, run).items():
                    logs.say(f"  {option}: {value!r}  (recommended for {chosen.model.method})")
                try:
                    train(chosen, folder)
                    evaluate(chosen, folder)
                except (DivergedError, UnfitError) as error:
                    logs.say(f"{name}: {error}")
                    if isinstance(error, UnfitError):
                        refused.append(name)
                jax.clear_caches()
        if hosts.is_first() and (not status or number == len(runs)):
            table = write_results(config, runs, workdir, drawing)
    if hosts.is_first():
        print(table, end="")
    if refused:
        raise UnfitError(f"sweep.grid: {some(refused)} could not run; the reasons are above")


def write_results(
    config: Config, runs: Mapping[str, tuple[sweeping.Run, Config]], workdir: Workdir, drawing: bool
) -> str:
    """Writes the results of a sweep so far and returns the table. Of several processes, the last one writes last."""
    folders = {name: (run, workdir.child(name)) for name, (run, _) in runs.items()}
    with workdir.locked(wait=True):
        rows = sweep_results.collect(runs, folders, sweep_results.main_metric(config))
        if config.sweep.baseline:
            sweep_results.compare(rows, folders, config.sweep.baseline, config.data.target_lang)
        table = sweep_results.to_markdown(rows, config.sweep.column_names, config.sweep.baseline)
        write_atomically(workdir / "sweep.csv", sweep_results.to_csv(rows))
        write_atomically(workdir / "sweep.md", table)
        if drawing:
            draw_sweep(rows, config.sweep.column_names, workdir / "sweep.png")
            draw_runs(folders, workdir / "sweep_curves.png")
    return table
