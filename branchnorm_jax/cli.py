"""The command line: `python main.py` in a checkout, `branchnorm` in the installed package.

This module defines the flags, starts up JAX and dispatches to the modes, which are in `modes/`.
"""

import atexit
import contextlib
import functools
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, TextIO, cast

from absl import flags
from ml_collections import config_flags

from branchnorm_jax import compiled
from branchnorm_jax import config as configs
from branchnorm_jax.errors import BranchNormError, OneLineWarning, Preempted, StorageError, UserError, one_line
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.options import Config, fields, sections
from branchnorm_jax.workdir import Workdir, runs_near

MODES = {
    "train": "train, or resume the run in the workdir",
    "evaluate": "translate the test split and score it, or compute its perplexity: <workdir>/results.json",
    "translate": "translate stdin to stdout or file to file, line by line",
    "serve": "serve translations over HTTP, with a web page, until Ctrl-C: see serve.port",
    "generate": "continue prompts with a language model, line by line: see decode.temperature",
    "average": "average several checkpoints of a run: <workdir>/average, see decode.checkpoint",
    "compare": "compare two or more systems on one test set: compare.html, compare.json in --workdir or here",
    "export": "export the model to CTranslate2 or Hugging Face, and compare it with ours: <workdir>/export/",
    "import": "make a workdir of a model that another toolkit trained: see import.path",
    "score": "print the log-probabilities of `source<TAB>target` lines, or of the lines of a language model",
    "analyze": "draw a run's curves and how signals pass through a model, trained or not: <workdir>/*.png, signal.csv",
    "methods": "list every method: equation, parameters, what depends on depth, recommended options, citation",
    "clean": "write a copy of the text without duplicates and other faulty pairs, and list those: <workdir>/clean/",
    "sweep": "train methods x depths x seeds one after the other, and make a table and a figure",
    "plan": "predict memory, time and device-days of a run without allocating anything: <workdir>/plan.json",
    "preflight": "check a run in a time lapse at its real depth: <workdir>/preflight.json, .png",
    "help": "list every option with its default and unit",
}

SHARED = {"train", "evaluate", "sweep"}
"""Modes that several processes run together."""

TRANSLATION = {"translate", "serve", "clean", "import"}
"""Modes that need a model for translation."""

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "configs" if (HERE / "configs").is_dir() else HERE.parent / "configs"
"""Folder of the project's config files. An installed package contains it; in a checkout it is next to the package."""

FLAGS = flags.FLAGS
NEED_RUN = "evaluate", "translate", "generate", "serve", "average", "export", "score"
"""Modes that need a trained run."""

flags.DEFINE_enum("mode", "train", list(MODES), "; ".join(f"{name}: {text}" for name, text in MODES.items()))
flags.DEFINE_string(
    "workdir",
    None,
    "folder of the run, or gs://bucket/folder (runs/<name of the config>): config, checkpoints, logs, results",
)
config_flags.DEFINE_config_file(
    "config", None, "config file, or name of one of the project's, with the depth: my/x.py:18L-18L", lock_config=True
)

MEMORY_ADVICE = (
    "lower train.batch_tokens or raise train.accumulation, set model.remat=full, or lower decode.batch_tokens; "
    "--mode=plan predicts the memory of a run"
)

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that end a process."""


class LastingStream:
    """stderr that discards its text once nobody reads it any more, so that a run outlives its terminal or pipe."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, or discards it."""
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, or discards it."""
        with self._lasting():
            self._stream.flush()

    @contextlib.contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def show_warning(show: Callable[..., None], message: Warning | str, *place: Any) -> None:
    """Prints a `OneLineWarning` as one line, and shows other warnings with `show`."""
    if isinstance(message, OneLineWarning):
        print(one_line(str(message)), file=sys.stderr)
    else:
        show(message, *place)


def command() -> NoReturn:
    """Runs `main` on the command line and ends the process with its exit code."""
    open_streams()
    sys.stderr = cast(TextIO, LastingStream(sys.stderr))
    warnings.showwarning = functools.partial(show_warning, warnings.showwarning)
    try:
        code = main(sys.argv)
    except Exception:
        traceback.print_exc()
        code = 1
    # Nothing is left to save, and Python may lose a handler's exception while it shuts down.
    end_at_once()
    # A mistake in the flags ends the process before this module, and with it JAX, is imported.
    if "branchnorm_jax.parallel.hosts" in sys.modules:
        sys.modules["branchnorm_jax.parallel.hosts"].leave(code)
    if code:
        # os._exit, because threads of the storage library would otherwise keep printing errors about their files, and
        # JAX would wait for other processes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def open_streams() -> None:
    """Puts /dev/null in the place of standard streams that are closed, as by 2>&-.

    Otherwise files that are opened later, such as logs, would have their numbers and get the messages.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number.
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def main(argv: list[str]) -> int:
    """Runs one mode and returns the exit code. Prints every error a user can cause as one line on stderr."""
    try:
        config, workdir = parse(argv)
        run(FLAGS.mode, config, workdir)
    except BranchNormError as error:
        kind = UserError if isinstance(error, UserError) else type(error)
        print(one_line(f"{kind.__name__}: {error}"), file=sys.stderr)
        return error.exit_code
    except Preempted as error:
        print(f"Preempted: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does, so the output is discarded silently.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(one_line(f"StorageError: {error}"), file=sys.stderr)
        return StorageError.exit_code
    except (RuntimeError, MemoryError) as error:
        said = f"{type(error).__name__}: {error}"
        if "can't start new thread" in said:
            what = "this process may start no further thread; raise its limits (ulimit -u, ulimit -v)"
        elif isinstance(error, MemoryError):
            what = (
                f"this process gets no more memory: the host has too little, or ulimit -v forbids it; {MEMORY_ADVICE}"
            )
        elif re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory|MemoryError", said):
            what = f"the device has too little memory; {MEMORY_ADVICE}"
        else:
            raise
        print(one_line(f"UserError: {what} ({said})"), file=sys.stderr)
        return UserError.exit_code
    return 0


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Lets signals end the process at once inside the context.

    Use it around imports, because an import turns an exception of a signal handler into a different error.
    """
    before = {number: signal.getsignal(number) for number in STOPPING}
    end_at_once()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def end_at_once() -> None:
    """Lets signals end the process from now on, unless they are ignored."""
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: end_by_signal(number))


def heed_signals() -> None:
    """Makes the signals of `STOPPING` raise `Preempted` from now on, unless they are ignored; not SIGINT."""
    sys.unraisablehook = send_again
    for number in STOPPING:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def stop(number: int, frame: FrameType | None) -> None:
    """Handles a signal in code that has nothing to save; the training loop installs its own handler.

    Raises:
      Preempted: always.
    """
    raise Preempted(f"stopped by signal {number}", number)


def send_again(lost: Any) -> None:
    """Sends a signal again if its exception was lost; installed as `sys.unraisablehook`.

    Python drops exceptions raised during garbage collection, including exceptions of signal handlers.
    """
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    number = lost.exc_value.signal_number if isinstance(lost.exc_value, Preempted) else signal.SIGINT
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    # If the process exits before the alarm, it still exits with the signal's code. Otherwise the alarm would kill it
    # during Python's shutdown.
    atexit.register(end_by_signal, number)


def end_by_signal(number: int) -> NoReturn:
    """Ends the process with exit code 128 + number."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the signal interrupted a write.
            stream.flush()
    os._exit(128 + number)


def parse(argv: list[str]) -> tuple[Config, Workdir]:
    """Parses the flags; returns the validated config and the workdir.

    The default of --config is the saved config of the workdir. The default of --workdir is runs/<name of the config>.

    Raises:
      UserError: if a flag, an option or the config file is invalid.
    """
    early = flags.FlagValues()
    for name in ("config", "workdir", "mode"):
        flags.DEFINE_string(name, None, "", flag_values=early)
    try:
        known = [argument for argument in argv if argument not in ("-h", "--help", "--helpfull")]
        _, *rest = early(known, known_only=True)
    except flags.Error as error:
        raise UserError(str(error)) from error
    if {"-h", "--help", "--helpfull"} & set(argv):
        return parse([argv[0], "--mode=help"])
    if early.mode not in (None, *MODES):
        raise UserError(f"--mode={early.mode}: the modes are {', '.join(MODES)}")
    check_names(argv)
    file, workdir = early.config, early.workdir
    if workdir == "":
        raise UserError("--workdir is empty; give a folder, or leave it out for runs/<name of the config>")
    source = find_config(file) if file is not None else None
    if workdir is None and source is not None:
        workdir = str(Path("runs", re.sub(r"\.py(:|$)", "-", Path(source).name).rstrip("-")))
    needless = early.mode in ("help", "methods")
    folder = Workdir.open(workdir if workdir and not needless else ".")
    if file is None:
        source = default_config(early.mode, workdir, folder / "config.json")
    chosen = {"config": source, "workdir": workdir, "mode": early.mode}
    argv = [argv[0], *(f"--{name}={value}" for name, value in chosen.items() if value is not None), *rest]
    # ml_collections also reads sys.argv, needs --config first, and cannot parse the keyword "import".
    argv = sys.argv = [re.sub(r"^(--?config\.import)\.", r"\1_.", argument) for argument in argv]
    import_configs()
    with config_errors(file):
        rest = FLAGS(argv)
        config = make_config() if source is not None else Config()
    if len(rest) > 1:
        raise UserError(f"unknown argument {rest[1]!r}; write options as --name=value")
    return config, folder


def make_config() -> Config:
    """Returns the config of the parsed flags, with the recommended options of its method."""
    if FLAGS.config is None:
        raise TypeError("get_config() returns None; it must return a ConfigDict")
    given = set(config_flags.get_override_values(FLAGS["config"]))
    options = configs.with_one_length(FLAGS.config, given)
    if FLAGS.mode == "sweep":
        # Each run of a sweep has its own method and depth, and therefore its own recommended options and T.
        configs.record_chosen(options, given)
    else:
        recipe = get_recipe(options.model.method)
        options = configs.with_alpha_steps(configs.with_recommended(options, recipe.recommended), recipe.warmup_layers)
    return configs.from_config_dict(options)


WRONG_VALUES = {
    "invalid literal for int": "a whole number",
    "could not convert string to float": "a number",
    "('Non-boolean argument": "True or False",
}
"""How absl's messages about a value of another type begin -> what the option expects."""


@contextlib.contextmanager
def config_errors(file: str | None) -> Iterator[None]:
    """Turns errors of the flags, and any error of a config file, into a `UserError`."""
    try:
        yield
    except BranchNormError:
        raise
    except (Exception, SystemExit) as error:
        text = str(error)
        if isinstance(error, flags.Error) and "Traceback" not in text:
            if isinstance(error, flags.UnrecognizedFlagError):
                near = configs.nearest_name(error.flagname.replace("-", "_"))
                text += f"; did you mean --config.{near}?" if near else ""
            for reason, expected in WRONG_VALUES.items():
                if reason in text:
                    text = f"{text[: text.index(reason)]}{expected} is expected"
            raise UserError(text.replace("\n", " ")) from error
        # ml_collections puts the traceback of a ValueError or TypeError into the message of another one. What follows
        # the last indented line is the error.
        kind = "" if "Traceback" in text else f"{type(error).__name__}: "
        lines = text.splitlines() if kind else re.split(r"^ .*\n", text, flags=re.MULTILINE)[-1].splitlines()
        reason = " ".join(filter(None, map(str.strip, lines))) or "no message"
        raise UserError(f"--config={file}: this file fails ({kind}{reason})") from error


def default_config(mode: str | None, workdir: str | None, saved: Path) -> str | None:
    """Returns the config file of a command without --config; None if the mode needs none.

    Args:
      mode: the flag --mode.
      workdir: the flag --workdir.
      saved: config.json of the workdir.

    Raises:
      UserError: if the workdir has no run, and the mode needs one.
    """
    if workdir and saved.exists() and mode != "import":
        return f"{CONFIGS / 'saved.py'}:{saved}"
    if mode == "import" and not workdir:
        raise UserError("--mode=import needs --workdir=<folder to make>")
    if mode in ("compare", "import"):
        return str(CONFIGS / "default.py")
    if mode in ("help", "methods"):
        return None
    if workdir and mode in NEED_RUN and (saved.parent / "checkpoints").is_dir():
        raise UserError(f"--workdir={workdir}: config.json is missing; restore it, or give the --config of this run")
    if workdir and mode in NEED_RUN:
        raise UserError(f"--workdir={workdir}: no training run in this folder{runs_near(saved.parent)}")
    if mode in NEED_RUN:
        raise UserError(f"--mode={mode} needs --workdir=<folder of a run>{runs_near(Path('runs'), 'here')}")
    where = f"earlier run in {workdir}{runs_near(saved.parent)}" if workdir else "--workdir of an earlier run"
    raise UserError(f"no --config and no {where}; give --config=<file or name>; {config_names()}")


def find_config(given: str) -> str:
    """Returns `given` with its config name replaced by the path of the file.

    "numerals:6L-6L" and "reproduce/rezero_table2" name configs of the project. "my/x.py:6L-6L" names any other file.

    Raises:
      UserError: if the file does not exist, or the project has no config of this name.
    """
    name, colon, depth = given.partition(":")
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        raise UserError(f"--config={given}: there is no such file; {config_names()}")
    return f"{path}{colon}{depth}"


def config_names() -> str:
    """Returns a text that lists the names that --config accepts besides a path."""
    names = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "saved")
    tables = sorted(path.stem for path in (CONFIGS / "reproduce").glob("*.py"))
    return f"the project's configs are {', '.join(names)}; for the papers' tables reproduce/{{{','.join(tables)}}}"


def import_configs() -> None:
    """Lets config files use `from configs import numerals`, even outside a checkout.

    The wheel has no top-level package `configs`, because other projects may install one.
    """
    package = ModuleType("configs")
    package.__path__ = [str(CONFIGS)]
    sys.modules.setdefault("configs", package)


def check_names(argv: list[str]) -> None:
    """Checks the names of the options on the command line.

    Raises:
      UserError: if --config.section.name does not exist (the message suggests the nearest name), if --config is given
        twice, or if --config.section names no option.
    """
    known = {name for name, _ in fields()}
    if sum(re.match(r"--?config(=|$)", argument) is not None for argument in argv) > 1:
        raise UserError(
            "--config is given twice; to change an option of the file, use --config.<section>.<option>=<value>"
        )
    for argument in argv[1:]:
        name = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if name and name[1] in sections(Config()):
            raise UserError(f"config: {name[1]!r} is a section; write --config.{name[1]}.<option>=<value>")
        if name and name[1] not in known:
            hint = configs.nearest_name(name[1])
            raise UserError(f"config: no option {name[1]!r}" + (f"; did you mean {hint!r}?" if hint else ""))


def run(mode: str, config: Config, workdir: Workdir) -> None:
    """Runs the mode. Imports heavy packages only here, so that mistakes in the flags are reported at once."""
    if mode == "help":
        print("\n".join(f"--mode={name:10} {text}" for name, text in MODES.items()) + "\n\n" + configs.help_text())
        return
    with undisturbed():
        import jax

        from branchnorm_jax import modes
        from branchnorm_jax.parallel import hosts

        function = modes.function_of(mode)
    heed_signals()
    if mode in TRANSLATION and config.model.family == "decoder":
        raise UserError(f"--mode={mode} needs a translation model; {workdir.path} has a language model")
    if mode == "train" and config.sweep.grid:
        raise UserError(
            "config: sweep.grid has several runs: add --mode=sweep, or train one run in another --workdir with "
            "--config.sweep.grid="
        )
    hosts.start(config.parallel)
    heed_signals()  # JAX has replaced the handler of SIGTERM if there are several processes.
    try:
        with hosts.blame_lost_process():
            jax.devices()
    except (RuntimeError, AssertionError) as error:
        wanted = f" with JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" if os.environ.get("JAX_PLATFORMS") else ""
        reason = f" ({error})" if str(error) else ""
        raise UserError(
            f"JAX finds no device{wanted}{reason}; install its package for this device, see requirements/, or unset "
            "JAX_PLATFORMS"
        ) from error
    if jax.process_count() > 1 and mode not in SHARED:
        raise UserError(
            f"--mode={mode} runs in one process, but there are {jax.process_count()}; start it without the launcher"
        )
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str((workdir / "compile_cache").absolute())
    jax.config.update("jax_compilation_cache_dir", cache)
    if mode == "train" and hosts.is_first():
        print(f"{workdir.path}: differences from the defaults", file=sys.stderr)
        recipe = get_recipe(config.model.method)
        chosen = configs.to_flat(config)
        for line in configs.difference(Config(), config, free=True):
            name = line.split(":")[0]
            why = f"  (recommended for {config.model.method})" if recipe.recommended.get(name) == chosen[name] else ""
            if name == "model.alpha_steps" and chosen[name] == configs.usual_alpha_steps(config, recipe.warmup_layers):
                why = "  (the default for this warm-up and depth)"
            print(f"  {line}{why}", file=sys.stderr)

    with contextlib.ExitStack() as stack:
        stack.enter_context(hosts.blame_lost_process())
        if hosts.is_first():
            stack.enter_context(workdir.published())
            if not compiled.usable(Path(cache), functools.partial(print, file=sys.stderr)):
                jax.config.update("jax_compilation_cache_dir", None)
            stack.callback(compiled.record, Path(cache))
        function(config, workdir)
