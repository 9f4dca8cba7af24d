"""Modes that use a trained model."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from branchnorm_jax.config import load as load_config
from branchnorm_jax.data.corpus import read_pairs, text_lines
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import MismatchError, UserError
from branchnorm_jax.evaluation import compare as comparing
from branchnorm_jax.evaluation.bleu import Score, mean_of
from branchnorm_jax.evaluation.comet import load_comet
from branchnorm_jax.evaluation.evaluate import format_table, score_split, write_results
from branchnorm_jax.evaluation.language import right_language
from branchnorm_jax.export import ctranslate2, fold, huggingface
from branchnorm_jax.modes.common import Trained, load
from branchnorm_jax.options import Config
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.trained import network, restored
from branchnorm_jax.workdir import Workdir, atomic_directory

TOLERANCE = 1e-3
"""Of an exported model: how much a token's log-probability may differ from ours."""


def evaluate(config: Config, workdir: Workdir) -> None:
    """Translates the splits of `evaluate.splits`, scores them, writes results.json and evaluation/.

    With several pairs of languages every one of them, or those of `evaluate.pairs`, also pairs never trained; what is
    called "test" is then the mean over "test.en-de", "test.fr-de" and so on.
    """
    workdir.check_config(config)
    workdir.create()
    trained, data, directory = load(config, workdir), config.data, workdir / "evaluation"
    asked = list(itertools.product(config.evaluate.split_names, data.directions(config.evaluate.pairs)))
    tags = [trained.translator.tokenizer.tags(data, direction.target_lang) for _, direction in asked]
    for split, direction in asked:
        # Before the first translation, so that a mistake in the last one is told at once.
        next(read_pairs(direction, split), None)
    comet = [load_comet(config.evaluate.comet)] if config.evaluate.comet else []
    decode = {"checkpoint": config.decode.checkpoint, "ensemble": config.decode.ensemble, **config.decode.search}
    run = {
        "step": trained.step,
        "models": trained.checksums,
        "pairs": config.evaluate.pairs or data.pairs,
        **decode,
    }
    results: dict[str, list[Score]] = {}
    each: dict[str, list[list[Score]]] = {}
    for (split, direction), tag in zip(asked, tags, strict=True):
        name = f"{split}.{direction.pair}" if data.pairs else split
        right = [right_language(direction.target_lang, data.languages)] if data.pairs else []
        sources, references = map(list, zip(*read_pairs(direction, split), strict=True))
        with logs.progress_bar(len(sources), 0, "line", name) as bar:
            found = trained.translator.translate(
                trained.params, trained.branch_scale, sources, progress=bar.update, tags=[tag] * len(sources)
            )
        texts = {"source": sources, "reference": references, "hypothesis": [best.text for best, *_ in found]}
        results[name] = score_split(directory, name, texts, direction.target_lang, [*right, *comet])
        each.setdefault(split, []).append(results[name])
        write_results(workdir / "results.json", results, directory, run)
    if data.pairs:
        results |= {split: mean_of(found) for split, found in each.items()}
        write_results(workdir / "results.json", results, directory, run)
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
    split, reference = config.compare.split, config.compare.reference
    if not config.compare.systems:
        raise UserError("compare: nothing to compare; give compare.systems=runs/a,runs/b, or files of translations")
    systems: dict[str, list[str]] = {}
    evaluated: list[Path] = []
    for name, path in config.compare.named():
        if name in systems:
            raise UserError(f"compare: two systems are called {name!r}; write name=path")
        if Path(path).is_dir():
            systems[name] = written(Path(path), split, "hypothesis")
            evaluated.append(Path(path))
        else:
            systems[name] = list(text_lines(Path(path)))
    references = list(text_lines(Path(reference))) if reference else None
    language, frequencies, sources = config.data.target_lang, None, None
    if evaluated:
        first, *others = evaluated
        theirs, sources = written(first, split, "reference"), written(first, split, "source")
        for other in others:
            if written(other, split, "reference") != theirs:
                raise UserError(f"compare: {other} was evaluated with other references than {first}")
        references = theirs if references is None else references
        # Of several pairs the split is called test.en-de, and that one may never have been trained.
        data = load_config(first / "config.json").data.directions(split.partition(".")[2])[0]
        language = data.target_lang
        logs.say(f"counting the words of the training text of {first}")
        try:
            frequencies = comparing.word_counts((target for _, target in read_pairs(data, "train")), language)
        except UserError as error:
            logs.say(f"counting the words of the references instead: {error}")
    if references is None:
        raise UserError("compare: none of the systems is a workdir; give compare.reference, the file of references")
    found = comparing.compare(systems, references, language, frequencies, sources)
    print(comparing.format_table(found))
    print(*comparing.write(found, workdir.path), sep="\n")


def written(workdir: Path, split: str, side: str) -> list[str]:
    """The lines that `evaluate` wrote: side is "source", "reference" or "hypothesis"."""
    path = workdir / "evaluation" / f"{split}.{side}"
    if not path.exists():
        there = ", ".join(sorted(found.stem for found in path.parent.glob(f"*.{side}"))) or "nothing"
        raise UserError(f"{path}: no such file, {there} was evaluated; see compare.split, or run --mode=evaluate")
    return list(text_lines(path))


def export(config: Config, workdir: Workdir) -> None:
    """Writes the model in the format of another engine, and compares log-probabilities where that is installed.

    Raises:
      UserError: if the method is not to be had there.
      MismatchError: if a token's log-probability differs by more than `TOLERANCE`, unless the weights were quantised.
    """
    workdir.check_config(config)
    e = config.export
    folder = Path(e.path).absolute() if e.path else workdir / "export" / e.name
    if config.decode.ensemble:
        raise UserError("config: an ensemble cannot be exported; leave decode.ensemble empty")
    if e.format == "huggingface" and e.quantization:
        raise UserError("config: export.quantization is for export.format=ctranslate2")
    if e.path and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"export.path={folder}: there is something already, which is not replaced; choose a new folder")
    trained = load(config, workdir)
    model, tokenizer = trained.translator.model, trained.translator.tokenizer
    if config.decode.length_penalty_kind != "fairseq":
        logs.say("other engines divide scores by L^p: set their length penalty yourself")
    if config.decode.temperature:
        logs.say("decode.temperature is not exported: other engines search unless you set their sampling yourself")
    if config.data.pairs and config.data.tags in ("target", "both"):
        logs.say(
            "translations begin with a language tag: give it to the engine, as target_prefix (CTranslate2) or "
            "forced_bos_token_id (Hugging Face)"
        )
    if reason := fold.obstacle(model):
        raise UserError(f"export: {config.model.method} is no plain Transformer: {reason}")
    plain = fold.fold(model, trained.params, trained.branch_scale)
    if e.format == "huggingface" and (reason := huggingface.obstacle(plain, config.model)):
        raise UserError(f"export: not for Hugging Face: {reason}; take export.format=ctranslate2")
    most = config.decode.max_input_length
    longest = max(most, trained.translator.engine.limit(most) + 1)
    vocabularies = tokenizer.source_pieces, tokenizer.target_pieces
    with atomic_directory(folder) as temporary:
        for side, model_proto in zip(("source", "target"), tokenizer.models, strict=True):
            (temporary / f"{side}.spm").write_bytes(model_proto)
        if e.format == "ctranslate2":
            ctranslate2.write(plain, config.model, vocabularies, temporary, longest, e.quantization)
            settings = ctranslate2.search_settings(config.decode, longest)
            (temporary / "translate.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        else:
            first = config.data.directions()[0]
            languages = first.source_lang, first.target_lang
            huggingface.write(plain, config.model, config.decode, vocabularies, languages, temporary, longest)
        if e.check_lines:
            check_export(config, trained, temporary, longest)
    logs.say(f"wrote {folder}, step {trained.step}")
    print(folder)


def check_export(config: Config, trained: Trained, folder: Path, longest: int) -> None:
    """Force-decodes the first validation pairs here and there, both in float32, if both sides fit into `longest`.

    Raises:
      UserError: if none of them does.
      MismatchError: as `export` says.
    """
    e, tokenizer, model = config.export, trained.translator.tokenizer, trained.translator.model
    exact = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype="float32", carry_dtype="float32"))
    validated = config.data.validated()
    each = -(-e.check_lines // len(validated))
    pairs = [(d, pair) for d in validated for pair in itertools.islice(read_pairs(d, "valid"), each)]
    tags = [tokenizer.tags(config.data, direction.target_lang) for direction, _ in pairs]
    translator = Translator(exact, tokenizer, config.decode)
    encoded = zip(*translator.encode([pair for _, pair in pairs], tags), strict=True)
    fitting = [sides for sides in encoded if max(map(len, sides)) <= longest]
    if not fitting:
        raise UserError(
            f"export: none of the first {len(pairs)} validation pairs fits into the {longest} positions of the "
            "exported model; set a larger decode.max_input_length, or export.check_lines=0 for no check"
        )
    if len(fitting) < len(pairs):
        logs.say(
            f"{len(pairs) - len(fitting)} of {len(pairs)} validation pairs are left out of the check: a side has more "
            f"tokens than the exported model has positions, {longest} (decode.max_input_length)"
        )
    sources, targets = zip(*fitting, strict=True)
    ours = translator.token_log_probs(trained.params, trained.branch_scale, sources, targets)
    try:
        if e.format == "ctranslate2":
            sides = (sources, tokenizer.source_pieces), (targets, tokenizer.target_pieces)
            given, asked = ([[pieces[token] for token in ids[:-1]] for ids in side] for side, pieces in sides)
            theirs = ctranslate2.log_probs(folder, given, asked)
        else:
            theirs = huggingface.log_probs(folder, sources, targets)
    except UserError as error:
        logs.say(f"not compared: {error}")
        return
    # Words that get no probability have another very small one on each side.
    used = ~np.isin(np.concatenate(targets), model.unused)
    apart = float(np.abs(np.concatenate(ours) - np.concatenate(theirs))[used].max())
    logs.say(f"largest difference of a token's log-probability over {len(fitting)} validation pairs: {apart:.2e}")
    if not apart <= TOLERANCE and not e.quantization:
        raise MismatchError(f"log-probabilities differ by {apart:.2e}, more than {TOLERANCE}: nothing was written")
