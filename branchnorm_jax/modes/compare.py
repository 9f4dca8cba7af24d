"""--mode=compare: compares two or more systems on one test set."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from branchnorm_jax.bucket import is_url
from branchnorm_jax.config import load as load_config
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation import compare as comparing
from branchnorm_jax.evaluation.text import LineLosses, compare_texts, format_comparison, read_losses
from branchnorm_jax.files import real, write_atomically
from branchnorm_jax.modes.output import best_translation
from branchnorm_jax.options import CompareConfig, Config
from branchnorm_jax.training import logs
from branchnorm_jax.workdir import Workdir, runs_near


def compare(config: Config, workdir: Workdir) -> None:
    """Compares the systems of `compare.systems`; prints a table, writes compare.json and, for translations, a page."""
    split, reference = config.compare.split, config.compare.reference
    given = systems_of(config.compare.systems)
    names = [name for name, _ in given]
    if len(names) < 2:
        raise UserError(
            "compare: needs two systems with a comma between them, as in compare.systems=runs/a,runs/b; files of "
            "translations are systems, too"
        )
    places = [path.rstrip("/") if is_url(path) else str(real(Path(path))) for _, path in given]
    if same := [name for name, place in zip(names, places, strict=True) if places.count(place) > 1]:
        raise UserError(f"compare: {same[0]} and {same[1]} are the same; name two different systems")
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UserError(f"compare: two systems are called {twice!r}; give them different names, as in name=path")
    runs = runs_of(given)
    if losses := losses_of(config.compare, names, runs):
        workdir.make()
        signatures = {name: signature_of(runs[name], split) for name in losses}
        compared = compare_texts(losses, signatures)
        if len({*signatures.values()}) > 1:
            logs.say("context, stride, rows or unknown tokens differ between the models; see their signatures")
        write_atomically(workdir / "compare.json", json.dumps(compared, indent=2, ensure_ascii=False) + "\n")
        print(format_comparison(compared), workdir / "compare.json", sep="\n")
        return
    systems = {
        name: written(runs[name], split, "hypothesis") if name in runs else translations_of(Path(path))
        for name, path in given
    }
    references = list(text_lines(Path(reference))) if reference else []
    language, frequencies, sources = config.compare.target_lang, None, None
    if runs:
        if language:
            raise UserError(f"compare.target_lang={language}: leave it out; the first workdir has a target language")
        first, *others = runs.values()
        theirs, sources = written(first, split, "reference"), written(first, split, "source")
        for other in others:
            if written(other, split, "reference") != theirs:
                raise UserError(
                    f"compare: the references of {other.path} differ from those of {first.path}; evaluate both on one "
                    "test set"
                )
        references = references if reference else theirs
        # With several pairs, the split is named like test.en-de. That pair may not be a trained one.
        data = load_config(first / "config.json").data.directions(split.partition(".")[2])[0]
        language = data.target_lang
        logs.say(f"counting the words of the training text of {first.path}")
        try:
            frequencies = comparing.word_counts((target for _, target in read_pairs(data, "train")), language)
        except UserError as error:
            logs.say(f"counting the words of the references instead: {error}")
    elif not reference:
        raise UserError("compare: none of the systems is a workdir; set compare.reference to a file of references")
    elif not language:
        raise UserError("compare: none of the systems is a workdir; set compare.target_lang to their language")
    workdir.make()
    comparison = comparing.compare(systems, references, language, frequencies, sources)
    print(comparing.format_table(comparison))
    print(*comparing.write(comparison, workdir.path), sep="\n")


def systems_of(text: str) -> list[tuple[str, str]]:
    """Returns `compare.systems` as (name, path). The name is the path itself, unless the part is name=path.

    A part that exists is a path, and a name has no slash, because the folders of a sweep's runs contain "=".

    Raises:
      UserError: if a path is empty.
    """
    systems = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, path = part.partition("=")
        is_path = not equals or "/" in name or Path(part).exists()
        if not is_path and not path:
            raise UserError(f"compare.systems: {part!r} has no path; write name=path")
        systems.append((part, part) if is_path else (name or path, path))
    return systems


def runs_of(systems: Sequence[tuple[str, str]]) -> dict[str, Workdir]:
    """Returns the systems that are workdirs, by name.

    Raises:
      UserError: if one is the folder of a sweep, or does not exist.
    """
    for _, path in systems:
        if not is_url(path) and not Path(path).exists():
            raise UserError(f"compare.systems: {path}: neither a workdir nor a file{runs_near(Path(path))}")
    runs = {name: Workdir.open(path) for name, path in systems if is_url(path) or Path(path).is_dir()}
    for run in runs.values():
        config = run / "config.json"
        if not config.exists():
            raise UserError(f"compare.systems: {run.path}: this folder is no workdir{runs_near(run.path)}")
        if load_config(config).sweep.grid and not run.has_checkpoints:
            raise UserError(f"compare: {run.path} is the folder of a sweep; name the folders of its runs")
    return runs


def translations_of(path: Path) -> list[str]:
    """Returns the translations in a file: its lines, or what is best in each line of `decode.format=jsonl`.

    Raises:
      UserError: if the file cannot be read.
    """
    translations = []
    for number, line in enumerate(text_lines(path), start=1):
        try:
            translations.append(best_translation(line))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: no translation in this JSON: {error}") from error
    return translations


def losses_of(config: CompareConfig, names: Sequence[str], runs: Mapping[str, Workdir]) -> dict[str, LineLosses]:
    """Returns the losses of the language models to compare, by name; {} if the systems are not language models."""
    saved = {name: run / "config.json" for name, run in runs.items()}
    decoders = [name for name in runs if saved[name].exists() and load_config(saved[name]).model.family == "decoder"]
    if not decoders:
        return {}
    if others := [name for name in names if name not in decoders]:
        raise UserError(f"compare: {others[0]} is no folder of a language model, but {decoders[0]} is")
    for option in ("reference", "target_lang"):
        if getattr(config, option):
            raise UserError(
                f"compare: compare.{option} is for translations; language models are compared on their text"
            )
    return {name: read_losses(runs[name] / "evaluation" / f"{config.split}.lines.tsv") for name in decoders}


def signature_of(workdir: Workdir, split: str) -> str:
    """Returns how the bits per byte of a language model were computed, from its results.json.

    Raises:
      UserError: if the file is missing or damaged.
    """
    path = workdir / "results.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))[split]["bits_per_byte"]["signature"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: has no bits per byte of {split} (a later evaluation with other options replaces them); run "
            "--mode=evaluate there"
        ) from error


def written(workdir: Workdir, split: str, side: str) -> list[str]:
    """Returns the lines that `evaluate` wrote; side is "source", "reference" or "hypothesis".

    Raises:
      UserError: if the split was not evaluated in this workdir.
    """
    path = workdir / "evaluation" / f"{split}.{side}"
    if not path.exists():
        found = sorted(file.stem for file in path.parent.glob(f"*.{side}"))
        if pairs := [each for each in found if each.startswith(f"{split}.")]:
            raise UserError(f"{path}: each language pair has a file of its own; set compare.split={' or '.join(pairs)}")
        splits = ", ".join(found) or "none"
        name, _, pair = split.partition(".")
        flags = f"--mode=evaluate --workdir={workdir.stored('.')} --config.evaluate.splits={name}"
        flags += f" --config.evaluate.pairs={pair}" * bool(pair)
        raise UserError(f"{path}: no such file; evaluated splits: {splits}; change compare.split, or run with {flags}")
    return list(text_lines(path))
