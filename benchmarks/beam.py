"""Compares the speed of the beam search with a straightforward one and with CTranslate2.

    python -m benchmarks.beam                       untrained: 6L-6L of width 512, 100L-100L of width 128
    python -m benchmarks.beam --workdir=runs/x      the test set of a trained model, compared with CTranslate2

The straightforward beam search is like those of public JAX examples. It repeats the source for each hypothesis,
recomputes the keys and values of the source at every step, gathers the whole cache when hypotheses branch, and
normalises over the whole vocabulary. It follows the same rules, so its hypotheses must be identical. It takes 64
sentences of 5 to 30 tokens, 32 at a time in the given order, padded to the longest of them. Hypotheses of untrained
models reach the length limit, 1.2 x + 3.

A second timing uses the best conditions for the straightforward beam: sentences sorted by length, and keys and values
computed only once, as XLA does for such code when it sees that the source stays the same.

CTranslate2 runs the exported model in float32 with batches of 32 and two threads: both for one batch, or one for each
of two concurrent batches, whichever is faster on this machine. With untrained models, all translations have 30 tokens
in both systems.

One sentence at a time, as in interactive use, is compared with one batch and two threads.

The benchmark also compares our decoder with one batch at a time and with two concurrent batches, and with float32 and
bfloat16 matrices.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import alternate, in_turn, save
from branchnorm_jax import config as configs
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.decoding.beam import length_penalty
from branchnorm_jax.decoding.engine import UNROLLED, Engine, Query, pad
from branchnorm_jax.evaluation.bleu import corpus_scores
from branchnorm_jax.export import ctranslate2, fold
from branchnorm_jax.model.cache import Cache
from branchnorm_jax.model.incremental import CurrentTokens, start_cache
from branchnorm_jax.model.incremental import step as decoder_step
from branchnorm_jax.model.segments import source_mask
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.common import load
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS, PAD, UNK
from branchnorm_jax.workdir import Workdir

SENTENCES, ROWS, SLOTS, VOCABULARY, LENGTH, SINGLE = 64, 32, 256, 8000, 30, 8
CONFIG = DecodeConfig(beam_size=4, length_penalty=0.6, max_length_a=1.2, max_length_b=3, batch_tokens=ROWS * 32 * 4)
MODELS = {
    "6L": ModelConfig(encoder_layers=6, decoder_layers=6, width=512, ffn_width=2048, heads=8, dropout=0.0),
    "100L": ModelConfig(encoder_layers=100, decoder_layers=100, width=128, ffn_width=512, heads=2, dropout=0.0),
}


def straightforward(
    model: Transformer, config: DecodeConfig, recompute: bool
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a jitted straightforward beam search.

    It maps (params, alpha, sources [B, S]) to tokens [B, K, SLOTS] and scores [B, K], best first. `recompute` prevents
    XLA from computing the keys and values of the source only once for all steps.
    """
    k = config.beam_size

    @jax.jit
    def search(params: Any, alpha: jax.Array, source_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, table = len(source_BS), model.positions(params, "decoder", SLOTS)
        lengths = (source_BS != PAD).sum(1)
        limits = jnp.floor(config.max_length_a * lengths + config.max_length_b).astype(jnp.int32)
        memory = jnp.repeat(model.encode(params, source_BS, alpha), k, axis=0)
        mask, sentence = source_mask(jnp.repeat(source_BS, k, axis=0)), jnp.arange(batch)[:, None]

        def stacked_cache(memory: jax.Array, slots: int) -> Cache:
            made = start_cache(model, params, memory, slots)
            assert isinstance(made, Cache)
            return made

        def step(state: Any) -> Any:
            position, live, totals, finished, scores, count, cache = state
            last = jnp.where(position == 0, EOS, live[:, :, jnp.maximum(position - 1, 0)]).reshape(-1, 1)
            here = jax.lax.optimization_barrier((memory, position))[0] if recompute else memory
            cross = stacked_cache(here, 0).cross
            seen = jnp.broadcast_to(jnp.arange(SLOTS) < position, (batch * k, 1, SLOTS))
            places = jnp.broadcast_to(table[position], (batch * k, 1, table.shape[1]))
            current = CurrentTokens(last, places, seen, position)
            logits, caches = decoder_step(model, params, Cache(cache, cross), mask, current, alpha)
            assert isinstance(caches, Cache)
            log_probs = jax.nn.log_softmax(logits).reshape(batch, k, -1)
            words, at_limit = jnp.arange(log_probs.shape[-1]), (position >= limits)[:, None, None]
            ban = (words == PAD) | ((words == EOS) & (position < 1)) | ((words != EOS) & at_limit)
            every = (totals[:, :, None] + jnp.where(ban, -jnp.inf, log_probs)).reshape(batch, -1)
            values, index = jax.lax.top_k(every, 2 * k)
            parent, token = index // len(words), (index % len(words)).astype(jnp.int32)
            tokens = live[sentence, parent].at[:, :, position].set(token)
            ends = token == EOS
            place = jnp.minimum(k, count[:, None] + jnp.cumsum(ends, axis=1) - 1)
            place = jnp.where(ends & (values > -jnp.inf) & (jnp.arange(2 * k) < k), place, k)
            divisor = length_penalty(position + 1, config.length_penalty, config.length_penalty_kind)
            alive = jnp.argsort(ends, axis=1, stable=True)[:, :k]
            rows = (sentence * k + parent[sentence, alive]).reshape(-1)
            return (
                position + 1,
                tokens[sentence, alive],
                jnp.where(ends, -jnp.inf, values)[sentence, alive],
                finished.at[sentence, place].set(tokens, mode="drop"),
                scores.at[sentence, place].set(values / divisor, mode="drop"),
                count + (place < k).sum(1),
                jax.tree.map(lambda leaf: leaf[:, rows], caches.self),  # the whole cache, at every step
            )

        def unfinished(state: Any) -> jax.Array:
            return jnp.any((state[5] < k) & (state[0] <= limits))

        nothing, empty = jnp.full((batch, k), -jnp.inf), jnp.zeros((batch, k, SLOTS), jnp.int32)
        cache = stacked_cache(memory, SLOTS).self
        start = (jnp.int32(0), empty, nothing.at[:, 0].set(0.0), empty, nothing, jnp.zeros(batch, jnp.int32), cache)
        _, _, _, finished, scores, _, _ = jax.lax.while_loop(unfinished, step, start)
        order = jnp.argsort(-scores, axis=1, stable=True)
        return finished[sentence, order], scores[sentence, order]

    return search


def made(name: str) -> tuple[Transformer, tuple[Any, jax.Array], list[list[int]]]:
    """Returns an untrained model, its parameters and alpha, and sentences to translate."""
    # A separate output table with larger logits; otherwise the model would always repeat the last word.
    config = dataclasses.replace(MODELS[name], shared_embeddings="none")
    model, rng = Transformer(config, VOCABULARY, VOCABULARY), np.random.default_rng(0)
    params, alpha = jax.jit(model.init)(jax.random.key(0)), jnp.float32(0.3)
    params["embedding"]["output"] = 4 * params["embedding"]["output"]
    sources = [[*rng.integers(3, VOCABULARY, rng.integers(4, 30)).tolist(), EOS] for _ in range(SENTENCES)]
    return model, (params, alpha), sources


def searched(engine: Engine, weights: tuple[Any, Any], sources: Sequence[Sequence[int]]) -> Callable[[], list[Any]]:
    """Returns a function that runs our search."""
    queries = [Query(source, number) for number, source in enumerate(sources)]
    return lambda: list(engine.search((weights,), queries))


def against_straightforward(name: str, pairs: int) -> dict[str, Any]:
    """Compares speed and hypotheses of our search with the straightforward beam search."""
    model, (params, alpha), sources = made(name)
    ours = searched(Engine((model,), CONFIG), (params, alpha), sources)

    def theirs(sources: list[list[int]], recompute: bool) -> Callable[[], list[Any]]:
        search = straightforward(model, CONFIG, recompute)
        parts = [sources[start : start + ROWS] for start in range(0, SENTENCES, ROWS)]
        batches = [jnp.asarray(pad(part, ROWS, max(map(len, part)))) for part in parts]
        return lambda: [search(params, alpha, batch) for batch in batches]

    as_written, at_best = theirs(sources, True), theirs(sorted(sources, key=len), False)
    tokens, scores = (np.concatenate(side) for side in zip(*jax.device_get(as_written()), strict=True))
    equal, largest, hypotheses = 0, 0.0, set()
    for index, nbest in ours():
        longest = nbest.tokens.shape[1]
        equal += bool((nbest.tokens[0] == tokens[index, 0, :longest]).all())
        largest = max(largest, float(abs(nbest.scores[0] - scores[index, 0])))
        hypotheses.add(tuple(nbest.tokens[0].tolist()))
    times = dict(zip(("as_written", "at_best", "ours"), in_turn((as_written, at_best, ours), pairs), strict=True))

    def ratio(other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[other], times["ours"], strict=True))

    return {
        "speedup": ratio("as_written"),
        "speedup_over_sorted_and_hoisted": ratio("at_best"),
        **{f"{which}_seconds": seconds for which, seconds in times.items()},
        "identical": f"{equal} of {SENTENCES}",
        "different_from_each_other": len(hypotheses),
        "largest_difference_of_scores": largest,
    }


def two_streams(name: str, pairs: int) -> dict[str, Any]:
    """Compares the time with one batch at a time and with two concurrent batches."""
    model, weights, sources = made(name)
    one, two = (
        searched(Engine((model,), dataclasses.replace(CONFIG, streams=streams)), weights, sources) for streams in (1, 2)
    )
    return {"one_over_two": alternate(one, two, pairs)}


def two_types(name: str, pairs: int) -> dict[str, Any]:
    """Compares the time with float32 and with bfloat16 matrices (`decode.dtype`)."""
    model, weights, sources = made(name)
    exact, narrow = (
        searched(Engine((model,), dataclasses.replace(CONFIG, dtype=dtype)), weights, sources)
        for dtype in ("model", "bfloat16")
    )
    return {"float32_over_bfloat16": alternate(exact, narrow, pairs)}


def exported(
    model: Transformer,
    weights: tuple[Any, Any],
    vocabularies: Sequence[list[str]],
    sources: Sequence[Sequence[str]],
    rows: int = ROWS,
    threading: Sequence[tuple[int, int]] = ((1, 2), (2, 1)),
    **settings: Any,
) -> tuple[Callable[[], Any], str]:
    """Returns CTranslate2's search with the same model, and the fastest of the settings (batches, threads of each)."""
    searches = {}
    with tempfile.TemporaryDirectory() as folder:
        ctranslate2.write(fold.fold(model, *weights), model.config, vocabularies, Path(folder), 1024, "")
        for batches, threads in threading:
            translator = ctranslate2.imported().Translator(
                folder, device="cpu", compute_type="float32", inter_threads=batches, intra_threads=threads
            )
            search = functools.partial(translator.translate_batch, sources, max_batch_size=rows, **settings)
            searches[f"{batches} x {threads}"] = search
    times = zip(searches, in_turn(list(searches.values()), 3), strict=True)
    fastest, _ = min(times, key=lambda found: statistics.median(found[1]))
    return searches[fastest], fastest


def against_ctranslate2(name: str, pairs: int) -> dict[str, Any]:
    """Compares the time of our search and of CTranslate2.

    Both make the same number of steps, because EOS is not allowed before LENGTH tokens. If the decoder is so
    deep that it runs in a loop, our search is also timed without a loop.
    """
    model, weights, sources = made(name)
    config = dataclasses.replace(CONFIG, max_length_a=0.0, max_length_b=LENGTH, min_length=LENGTH)
    engine = Engine((model,), config)
    ours = searched(engine, weights, sources)
    pieces = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(UNK + 1, VOCABULARY))]
    given = [[pieces[token] for token in source[:-1]] for source in sources]
    settings = ctranslate2.search_settings(config, LENGTH + 2)
    other, threads = exported(model, weights, (pieces, pieces), given, **settings)
    mine = {index: [pieces[token] for token in nbest.tokens[0, :LENGTH]] for index, nbest in ours()}
    equal = sum(one.hypotheses[0][:LENGTH] == mine[index] for index, one in enumerate(other()))
    measured: dict[str, Any] = {"over_ctranslate2": alternate(other, ours, pairs)}
    few = range(0, SENTENCES, SENTENCES // SINGLE)
    one_by_one = [searched(engine, weights, [sources[index]]) for index in few]
    alone, _ = exported(
        model, weights, (pieces, pieces), [given[index] for index in few], rows=1, threading=((1, 2),), **settings
    )
    measured["one_at_a_time_over_ctranslate2"] = alternate(alone, lambda: [search() for search in one_by_one], pairs)
    if model.config.decoder_layers > UNROLLED:
        unrolled = dataclasses.replace(config, unroll=model.config.decoder_layers)
        flat = searched(Engine((model,), unrolled), weights, sources)
        measured["without_loop_over_ctranslate2"] = alternate(other, flat, pairs)
    return {
        **measured,
        "ctranslate2_batches_x_threads": threads,
        "identical_to_ctranslate2": f"{equal} of {SENTENCES}",
    }


def trained(folder: Path, pairs: int) -> dict[str, Any]:
    """Compares our search with CTranslate2 on the test set of a run."""
    workdir = Workdir(folder)
    config = configs.load(workdir / "config.json")
    decode = dataclasses.replace(CONFIG, max_length_a=2.0, max_length_b=20)
    config = dataclasses.replace(config, decode=decode)
    run = load(config, workdir)
    translator, tokenizer = run.translator, run.translator.tokenizer
    test = list(read_pairs(config.data, "test"))
    sources, references = [source for source, _ in test], [target for _, target in test]
    ids = tokenizer.encode_source(sources)
    weights = run.params, run.alpha
    ours = searched(translator.engine, weights, ids)
    pieces = [[tokenizer.source_pieces[token] for token in line[:-1]] for line in ids]
    vocabularies = tokenizer.source_pieces, tokenizer.target_pieces
    settings: dict[str, Any] = dict(beam_size=4, length_penalty=0.6, max_decoding_length=SLOTS)
    other, threads = exported(translator.model, weights, vocabularies, pieces, **settings)
    mine: list[str] = [""] * len(ids)
    for index, nbest in ours():
        mine[index] = tokenizer.decode_target(nbest.tokens[0].tolist())
    id_of = {piece: index for index, piece in enumerate(tokenizer.target_pieces)}
    yours = [tokenizer.decode_target([id_of[piece] for piece in result.hypotheses[0]]) for result in other()]
    language = config.data.target_lang
    return {
        "ctranslate2_over_ours": alternate(other, ours, pairs),
        "ctranslate2_batches_x_threads": threads,
        "sentences": len(ids),
        "bleu_ours": corpus_scores(mine, references, language)["bleu"],
        "bleu_ctranslate2": corpus_scores(yours, references, language)["bleu"],
        "identical_lines": sum(a == b for a, b in zip(mine, yours, strict=True)),
        "model": f"{config.model.depth} width {config.model.width}",
        "alpha": json.dumps(jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), run.alpha)),
    }


MEASURES = {
    "straightforward": against_straightforward,
    "ctranslate2": against_ctranslate2,
    "streams": two_streams,
    "types": two_types,
}


def main() -> None:
    """Runs the selected measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of each measurement")
    parser.add_argument("--workdir", type=Path, help="a trained run, instead of the untrained models")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--measures", nargs="*", default=list(MEASURES), choices=list(MEASURES))
    arguments = parser.parse_args()
    if arguments.workdir:
        save("beam_trained", trained(arguments.workdir, arguments.pairs))
        return
    for name, measure in itertools.product(arguments.models, arguments.measures):
        jax.clear_caches()
        save(f"beam_{name}_{measure}", MEASURES[measure](name, arguments.pairs))


if __name__ == "__main__":
    main()
