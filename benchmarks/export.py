"""Compares exported models with ours: log-probabilities, and BLEU of beam 4.

    python -m benchmarks.export runs/a runs/b:500 ...       each is a workdir or workdir:checkpoint

The engines are CTranslate2 and Hugging Face's Marian. Log-probabilities are computed in float32 for the references of
the first 100 test sentences, with EOS. BLEU is computed for our decoder and CTranslate2 on --lines test sentences, with
the same search options and one length limit for all sentences, as CTranslate2 requires.
"""

import argparse
import dataclasses
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import save
from branchnorm_jax import config as configs
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.evaluation.bleu import corpus_scores
from branchnorm_jax.export import ctranslate2, fold, huggingface
from branchnorm_jax.export.tokenizers import Vocabulary
from branchnorm_jax.modes.common import load
from branchnorm_jax.workdir import Workdir

FORCED, LIMIT = 100, 80


def compared(name: str, lines: int) -> dict[str, Any]:
    """Compares one checkpoint in all engines."""
    folder, _, which = name.partition(":")
    config = configs.load(Path(folder) / "config.json")
    decode = dataclasses.replace(config.decode, checkpoint=which or "best", beam_size=4, length_penalty=0.6)
    decode = dataclasses.replace(decode, max_length_a=0, max_length_b=LIMIT)
    config = dataclasses.replace(config, decode=decode)
    run = load(config, Workdir(Path(folder)))
    translator, tokenizer, m = run.translator, run.translator.tokenizer, config.model
    test = list(itertools.islice(read_pairs(config.data, "test"), lines))
    ids = tokenizer.encode_source([source for source, _ in test])
    sources, targets = translator.encode(test[:FORCED], [tokenizer.tags(config.data, "", "")] * len(test[:FORCED]))
    ours = np.concatenate(translator.token_log_probs(run.params, run.alpha, sources, targets))
    plain = fold.fold(translator.model, run.params, run.alpha)
    vocabularies = tokenizer.source_pieces, tokenizer.target_pieces
    longest = max(*(len(line) for line in (*ids, *targets)), LIMIT + 1)
    result: dict[str, Any] = {
        "model": f"{m.method} {m.depth}, width {m.width}",
        "step": run.step,
        "alpha": jax.tree.map(lambda leaf: np.unique(leaf).tolist(), run.alpha),
    }
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        vocabulary = Vocabulary(*vocabularies, tokenizer.models, translator.model.tags)
        numbers = huggingface.write(plain, m, config.decode, vocabulary, path, longest)
        given = (
            [side[line].tolist() for line in lines] for side, lines in zip(numbers, (sources, targets), strict=True)
        )
        theirs = np.concatenate(huggingface.log_probs(path, *given))
        result["huggingface_largest_difference"] = float(np.abs(ours - theirs).max())
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        ctranslate2.write(plain, m, vocabularies, path, longest, "")
        sides = (sources, tokenizer.source_pieces), (targets, tokenizer.target_pieces)
        source_pieces, target_pieces = (
            [[pieces[token] for token in line[:-1]] for line in side] for side, pieces in sides
        )
        theirs = np.concatenate(ctranslate2.log_probs(path, source_pieces, target_pieces))
        result["ctranslate2_largest_difference"] = float(np.abs(ours - theirs).max())
        engine = ctranslate2.imported().Translator(str(path), device="cpu", compute_type="float32")
        pieces = [[tokenizer.source_pieces[token] for token in line[:-1]] for line in ids]
        settings = ctranslate2.search_settings(config.decode, LIMIT + 1)
        results = engine.translate_batch(pieces, **settings, max_batch_size=32)
    id_of = {piece: index for index, piece in enumerate(tokenizer.target_pieces)}
    yours = [tokenizer.decode_target([id_of[piece] for piece in result.hypotheses[0]]) for result in results]
    translated = translator.translate(run.params, run.alpha, [source for source, _ in test])
    mine = [best[0].text for best in translated]
    references, language = [target for _, target in test], config.data.target_lang
    return result | {
        "sentences": len(test),
        "bleu_ours": corpus_scores(mine, references, language)["bleu"],
        "bleu_ctranslate2": corpus_scores(yours, references, language)["bleu"],
        "identical_lines": sum(a == b for a, b in zip(mine, yours, strict=True)),
    }


def main() -> None:
    """Compares every run and saves the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--name", default="export", help="name of the results file")
    arguments = parser.parse_args()
    results = []
    for name in arguments.runs:
        results.append(compared(name, arguments.lines))
        print(json.dumps(results[-1]), flush=True)
        save(arguments.name, {"models": results})
        jax.clear_caches()


if __name__ == "__main__":
    main()
