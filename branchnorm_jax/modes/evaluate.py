"""--mode=evaluate: translates the test splits and scores them."""

import contextlib
import hashlib
import itertools
import json

from branchnorm_jax.data.corpus import check_texts, read_pairs
from branchnorm_jax.evaluation.bleu import Measure, Score, mean_of
from branchnorm_jax.evaluation.comet import load_comet
from branchnorm_jax.evaluation.evaluate import format_table, score_split, scoring_options, write_results
from branchnorm_jax.evaluation.language import right_language
from branchnorm_jax.modes.common import agree, count_split, load, say_split
from branchnorm_jax.modes.language import evaluate_text, say_removed
from branchnorm_jax.options import Config
from branchnorm_jax.parallel import hosts
from branchnorm_jax.training import logs
from branchnorm_jax.workdir import Workdir


def evaluate(config: Config, workdir: Workdir) -> None:
    """Evaluates the run on the splits of `evaluate.splits`, and writes results.json and evaluation/."""
    workdir.check_config(config)
    workdir.create()
    with contextlib.ExitStack() as stack:
        hosts.first_then_others(
            lambda: stack.enter_context(workdir.evaluated(logs.say)), lambda: None, "which evaluates"
        )
        if config.model.family == "decoder":
            evaluate_text(config, workdir)
        else:
            evaluate_translations(config, workdir)


def evaluate_translations(config: Config, workdir: Workdir) -> None:
    """Translates the splits and scores the translations.

    Several processes all translate everything, with the parameters spread over their devices as `parallel.model` says.
    The first one scores and writes.

    A run with several language pairs evaluates all of them, or those of `evaluate.pairs`, which may include pairs that
    were never trained. The score "test" is then the mean over "test.en-de", "test.fr-de" and so on.
    """
    trained, data, directory = load(config, workdir), config.data, workdir / "evaluation"
    check_texts(data.directions(config.evaluate.pairs), config.evaluate.split_names, "evaluate.pairs")
    test_sets = list(itertools.product(config.evaluate.split_names, data.directions(config.evaluate.pairs)))
    tags = [trained.translator.tokenizer.tags(data, d.source_lang, d.target_lang) for _, d in test_sets]
    for split, direction in test_sets:
        # Read a line of every file before the first translation, so that a faulty file is reported at once.
        next(read_pairs(direction, split), None)
    agree(config, step=trained.step, models=trained.checksums)
    logs.say(f"evaluating the checkpoint of step {trained.step} (decode.checkpoint={config.decode.checkpoint})")
    comet: list[Measure] = []
    if config.evaluate.comet:
        comet = hosts.first_then_others(lambda: [load_comet(config.evaluate.comet)], list, "which loads COMET")
    run = {"step": trained.step, "models": trained.checksums, **scoring_options(config)}
    run["terms"] = trained.translator.glossary.sha256
    say_removed(workdir / "results.json", run)
    results: dict[str, list[Score]] = {}
    each: dict[str, list[list[Score]]] = {}
    for (split, direction), tag in zip(test_sets, tags, strict=True):
        name = f"{split}.{direction.pair}" if data.pairs else split
        right = [right_language(direction.target_lang, data.languages)] if data.pairs else []
        sources, references = map(list, zip(*read_pairs(direction, split), strict=True))
        empty = [number for number, pair in enumerate(zip(sources, references, strict=True), start=1) if not all(pair)]
        if empty:
            logs.say(
                f"{name}: {len(empty)} pairs have an empty side, the first in line {empty[0]}; they are scored, too"
            )

        agree(config, **{f"the text of {name}": hashlib.sha256(json.dumps([sources, references]).encode()).hexdigest()})
        with logs.progress_bar(len(sources), 0, "line", name) as bar:
            nbest = trained.translator.translate(
                trained.params, trained.alpha, sources, (name, 1), bar.update, tags=[tag] * len(sources)
            )
        say_split(count_split(nbest), config.decode, trained.translator.limit)
        if not hosts.is_first():
            continue
        texts = {"source": sources, "reference": references, "hypothesis": [best.text for best, *_ in nbest]}
        results[name] = score_split(directory, name, texts, direction.target_lang, [*right, *comet])
        each.setdefault(split, []).append(results[name])
        write_results(workdir / "results.json", results, directory, run)
    if not hosts.is_first():
        return
    if data.pairs:
        results |= {split: mean_of(scores) for split, scores in each.items()}
        write_results(workdir / "results.json", results, directory, run)
    print(format_table(results))
