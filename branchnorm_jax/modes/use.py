"""Modes that use a trained model."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from branchnorm_jax.config import load as load_config
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.tokenizer import atomic_directory
from branchnorm_jax.errors import MismatchError, UserError
from branchnorm_jax.evaluation import compare as comparing
from branchnorm_jax.evaluation.evaluate import evaluate_split, format_table, write_results
from branchnorm_jax.export import ctranslate2, fold, huggingface
from branchnorm_jax.modes.common import Trained, load, network, restored
from branchnorm_jax.options import Config
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.workdir import Workdir

TOLERANCE = 1e-3
"""Of an exported model: how much a token's log-probability may differ from ours."""


def evaluate(config: Config, workdir: Workdir) -> None:
    """Translates the splits of `evaluate.splits`, scores them, writes results.json and evaluation/."""
    workdir.check_config(config)
    workdir.create()
    trained = load(config, workdir)
    directory, results = workdir / "evaluation", {}
    for split in config.evaluate.split_names:
        pairs = list(read_pairs(config.data, split))
        with logs.progress_bar(len(pairs), 0, "line", split) as bar:
            results[split] = evaluate_split(
                trained.translator,
                trained.params,
                trained.branch_scale,
                split,
                pairs,
                directory,
                config.data.target_lang,
                bar.update,
            )
    write_results(workdir / "results.json", results, directory, {"step": trained.step, **vars(config.decode)})
    print(format_table(results))


def average(config: Config, workdir: Workdir) -> None:
    """The mean of the parameters of several checkpoints, added up in float64: <workdir>/average.

    `decode.checkpoint=average` uses it. BranchNorm's alpha is the mean of theirs, too.
    """
    workdir.check_config(config)
    _, model = network(config, workdir)
    there = Checkpoints(workdir / "checkpoints", config.train, logs.say, read_only=True)
    steps = there.several(config.average.checkpoints)
    total: Any = None
    for step in steps:
        found = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), restored(config, workdir, model, str(step))[:2])
        total = found if total is None else jax.tree.map(np.add, total, found)
    params, alpha = jax.tree.map(lambda leaf: np.asarray(leaf / len(steps), np.float32), total)
    with atomic_directory(workdir / "average") as folder:
        Checkpoints(folder, config.train, logs.say).save_params(steps[-1], params, alpha, {"averaged": steps})
    logs.say(f"mean of the checkpoints {', '.join(map(str, steps))}; --config.decode.checkpoint=average uses it")
    print(workdir / "average")


def compare(config: Config, workdir: Workdir) -> None:
    """Compares the systems of `compare.systems`: a table, compare.json and compare.html in the workdir."""
    split = config.compare.split
    systems: dict[str, list[str]] = {}
    reference, sources, language, frequencies = config.compare.reference, None, config.data.target_lang, None
    for name, path in config.compare.named():
        if name in systems:
            raise UserError(f"compare: two systems are called {name!r}; write name=path")
        folder = Path(path)
        if not folder.is_dir():
            systems[name] = lines_of(folder)
            continue
        systems[name] = lines_of(folder / "evaluation" / f"{split}.hypothesis")
        if not reference:
            reference = str(folder / "evaluation" / f"{split}.reference")
            sources = lines_of(folder / "evaluation" / f"{split}.source")
            data = load_config(folder / "config.json").data
            language = data.target_lang
            logs.say(f"counting the words of the training text of {path}")
            text = (target for _, target in read_pairs(data, "train"))
            frequencies = comparing.word_counts(text, language)
        elif not config.compare.reference and lines_of(folder / "evaluation" / f"{split}.reference") != lines_of(
            Path(reference)
        ):
            raise UserError(f"compare: {path} was evaluated with other references than {reference}")
    if not reference:
        raise UserError("compare: none of the systems is a workdir; give compare.reference, the file of references")
    found = comparing.compare(systems, lines_of(Path(reference)), language, frequencies, sources)
    print(comparing.format_table(found))
    print(*comparing.write(found, workdir.path), sep="\n")


def lines_of(path: Path) -> list[str]:
    """Lines of a text file, split at line feeds alone. Raises `UserError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{path}: cannot be read: {reason}") from error


def export(config: Config, workdir: Workdir) -> None:
    """Writes the model in the format of another engine, and compares log-probabilities where that is installed.

    Raises:
      UserError: if the method is not to be had there.
      MismatchError: if a token's log-probability differs by more than `TOLERANCE`, unless the weights were quantised.
    """
    workdir.check_config(config)
    trained = load(config, workdir)
    e, model, tokenizer = config.export, trained.translator.model, trained.translator.tokenizer
    if reason := fold.obstacle(model):
        raise UserError(f"export: {config.model.method} is no plain Transformer: {reason}")
    plain = fold.fold(model, trained.params, trained.branch_scale)
    if e.format == "huggingface":
        if e.quantization:
            raise UserError("config: export.quantization is for export.format=ctranslate2")
        if reason := huggingface.obstacle(plain, config.model):
            raise UserError(f"export: not for Hugging Face: {reason}; take export.format=ctranslate2")
    most = config.decode.max_input_length
    longest = max(most, trained.translator.engine.limit(most) + 1)
    vocabularies = tokenizer.source_pieces, tokenizer.target_pieces
    folder = Path(e.path) if e.path else workdir / "export" / "-".join(filter(None, (e.format, e.quantization)))
    with atomic_directory(folder) as temporary:
        for side, model_proto in zip(("source", "target"), tokenizer.models, strict=True):
            (temporary / f"{side}.spm").write_bytes(model_proto)
        if e.format == "ctranslate2":
            ctranslate2.write(plain, config.model, vocabularies, temporary, longest, e.quantization)
            settings = ctranslate2.search_settings(config.decode)
            (temporary / "translate.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        else:
            languages = config.data.source_lang, config.data.target_lang
            huggingface.write(plain, config.model, config.decode, vocabularies, languages, temporary, longest)
    logs.say(f"wrote {folder}, step {trained.step}")
    if e.check_lines:
        check_export(config, trained, folder)
    print(folder)


def check_export(config: Config, trained: Trained, folder: Path) -> None:
    """Force-decodes the first validation pairs here and there."""
    e, (translator, tokenizer) = config.export, (trained.translator, trained.translator.tokenizer)
    pairs = list(itertools.islice(read_pairs(config.data, "valid"), e.check_lines))
    sources = tokenizer.encode_source([source for source, _ in pairs])
    targets = tokenizer.encode_target([target for _, target in pairs])
    ours = translator.token_log_probs(trained.params, trained.branch_scale, sources, targets)
    try:
        if e.format == "ctranslate2":
            sides = (sources, tokenizer.source_pieces), (targets, tokenizer.target_pieces)
            given, asked = ([[pieces[token] for token in ids[:-1]] for ids in side] for side, pieces in sides)
            theirs = ctranslate2.log_probs(folder, given, asked, e.quantization)
        else:
            theirs = huggingface.log_probs(folder, sources, targets)
    except UserError as error:
        logs.say(f"not compared: {error}")
        return
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    logs.say(f"largest difference of a token's log-probability over {len(pairs)} validation pairs: {apart:.2e}")
    if apart > TOLERANCE and not e.quantization:
        raise MismatchError(f"{folder}: log-probabilities differ by {apart:.2e}, more than {TOLERANCE}; do not use it")
