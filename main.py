"""Front door: `python main.py --config=configs/x.py:18L-18L --workdir=runs/x [--mode=...] [--config.section.name=value]`.

Flags, start-up and dispatch; what happens then is in `branchnorm_jax/`.
"""

import os
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from branchnorm_jax import config as configs
from branchnorm_jax.config import Config
from branchnorm_jax.errors import BranchNormError, UserError
from branchnorm_jax.workdir import Workdir

MODES = {
    "train": "train, or resume what the workdir holds",
    "evaluate": "translate the test split and score it: <workdir>/results.json",
    "translate": "translate stdin to stdout, line by line",
    "score": "log-probabilities of `source<TAB>target` lines from stdin",
    "plan": "parameters, operations and bytes, before anything is allocated",
    "help": "every option with its default and unit",
}

FLAGS = flags.FLAGS
flags.DEFINE_enum("mode", "train", list(MODES), "; ".join(f"{name}: {text}" for name, text in MODES.items()))
flags.DEFINE_string("workdir", None, "folder of the run: config, checkpoints, logs, results")
config_flags.DEFINE_config_file("config", None, "file under configs/, with the depth: configs/x.py:18L-18L", lock_config=True)


def main(argv: list[str]) -> int:
    """Runs one mode and returns the exit code; every error a user can meet is one line on stderr."""
    try:
        config, workdir = parse(argv)
        run(FLAGS.mode, config, workdir)
    except BranchNormError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away, as `head` does: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse(argv: list[str]) -> tuple[Config, Workdir | None]:
    """Flags -> validated config and workdir. Without --config, the workdir's own config is used."""
    names = [argument.split("=")[0].lstrip("-") for argument in argv]
    if "config" not in names:
        saved = [argument.split("=", 1)[1] for argument in argv if argument.lstrip("-").startswith("workdir=")]
        path = Path(saved[-1], "config.json") if saved else None
        if path and path.exists():
            argv = [argv[0], f"--config={Path(__file__).parent / 'configs' / 'saved.py'}:{path}", *argv[1:]]
        elif "mode=help" not in {argument.lstrip("-") for argument in argv}:
            found = ", ".join(sorted(f"configs/{file.name}" for file in Path(__file__).parent.glob("configs/*.py")))
            where = f"and {path} does not exist" if path else "and no --workdir of an earlier run"
            raise UserError(f"no --config {where}; give one of {found}")
    try:
        rest = FLAGS(argv)
        FLAGS.config  # noqa: B018 - config_flags reads the file when it is first asked for
    except AttributeError as error:
        name = str(error).strip("\"'").split("'")[0]
        hint = configs.nearest_name(name)
        raise UserError(f"config: no option {name!r}" + (f"; did you mean {hint!r}?" if hint else "")) from error
    except (flags.Error, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(str(error).replace("\n", " ")) from error
    if len(rest) > 1:
        raise UserError(f"what is {rest[1]!r}? Options are written --name=value")
    config = configs.from_config_dict(FLAGS.config) if FLAGS.config is not None else Config()
    return config, Workdir(Path(FLAGS.workdir)) if FLAGS.workdir else None


def run(mode: str, config: Config, workdir: Workdir | None) -> None:
    """Dispatches; heavy packages are imported only here, so that mistakes are told at once."""
    if mode == "help":
        print("\n".join(f"--mode={name:10} {text}" for name, text in MODES.items()) + "\n\n" + configs.help_text())
        return
    if workdir is None and mode != "plan":
        raise UserError(f"--mode={mode} needs --workdir")

    import jax

    from branchnorm_jax.parallel import hosts

    hosts.start(config.parallel.distributed)
    if workdir is not None:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str((workdir / "compile_cache").absolute())
        jax.config.update("jax_compilation_cache_dir", cache)
    if mode == "train":
        for line in configs.difference(Config(), config, free=True):
            print(f"  {line}", file=sys.stderr)

    from branchnorm_jax import modes

    getattr(modes, mode)(config, workdir)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
