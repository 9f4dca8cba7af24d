"""Mixtures of corpora: sampling rates, tags and files."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.data.batches import BatchPlan, make_plans
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.mixture import Mixture
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.store import TokenStore
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import EOS


def store_of(sentences: list[tuple[list[int], list[int]]]) -> TokenStore:
    sources, targets = ([np.array(pair[side], np.uint16) for pair in sentences] for side in (0, 1))
    return TokenStore(
        source_tokens=np.concatenate(sources),
        target_tokens=np.concatenate(targets),
        source_offsets=np.cumsum([0, *map(len, sources)]),
        target_offsets=np.cumsum([0, *map(len, targets)]),
        fingerprint="",
        counts={},
        max_length=100,
        max_ratio=0.0,
        reused=False,
    )


def random_store(random: np.random.Generator, size: int) -> TokenStore:
    def sentence() -> list[int]:
        return [*random.integers(3, 100, random.integers(1, 4)), EOS]

    return store_of([(sentence(), sentence()) for _ in range(size)])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 99))
def test_mixture_concatenates_the_sentences_of_its_stores(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    stores = [random_store(random, size) for size in sizes]
    mixture = Mixture(stores)
    sources = [ids for store in stores for ids in np.split(store.source_tokens, store.source_offsets[1:-1])]
    targets = [ids for store in stores for ids in np.split(store.target_tokens, store.target_offsets[1:-1])]
    ids = random.integers(0, len(sources), 20)
    np.testing.assert_array_equal(mixture.gather("source", ids), np.concatenate([sources[i] for i in ids]))
    np.testing.assert_array_equal(mixture.gather("target", ids), np.concatenate([targets[i] for i in ids]))
    assert mixture.lengths.tolist() == [[len(s), len(t)] for s, t in zip(sources, targets, strict=True)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from([1.0, 1.5, 5.0, 100.0]),
    st.integers(0, 99),
)
def test_epochs_draw_by_temperature_and_evenly(sizes: list[int], temperature: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    mixture = Mixture([random_store(random, size) for size in sizes], temperature)
    shares = np.array(sizes) ** (1 / temperature)
    expected = shares / shares.max() * max(sizes)
    np.testing.assert_array_less(np.abs(np.array(mixture.draws) - expected), 0.501)

    epochs = [mixture.drawn(epoch) for epoch in range(4)]
    for drawn in epochs:
        np.testing.assert_array_equal(mixture.lengths[drawn], mixture.lengths[epochs[0]])
        for store, count in enumerate(mixture.draws):
            inside = (drawn >= mixture.starts[store]) & (drawn < mixture.starts[store + 1])
            assert inside.sum() == count

    # Pairs of the same store and lengths occur equally often, up to 1, in every epoch and over all epochs.
    groups = [(int(np.searchsorted(mixture.starts, i, side="right")), *mixture.lengths[i]) for i in range(sum(sizes))]
    for drawn in (*epochs, np.concatenate(epochs)):
        times = np.bincount(drawn, minlength=sum(sizes))
        for group in set(groups):
            same = [int(n) for n, other in zip(times, groups, strict=True) if other == group]
            assert max(same) - min(same) <= 1
        assert times.min() >= 1


def test_temperature_1_draws_every_pair_once() -> None:
    mixture = Mixture([random_store(np.random.default_rng(0), size) for size in (3, 50)])
    assert sorted(mixture.drawn(7).tolist()) == list(range(53))


def test_batches_contain_the_drawn_sentences() -> None:
    random = np.random.default_rng(0)
    train = Mixture([random_store(random, size) for size in (400, 30)], 5.0)
    plan, (valid,) = make_plans(DataConfig(row_multiple=2), train, [train.stores[1]], 256, 0)
    for epoch in range(3):
        assert Counter(ids_of(plan, epoch)) == Counter(train.drawn(epoch).tolist())
    assert sorted(ids_of(valid, 0)) == list(range(30))
    assert sum(train.draws) == len(train.drawn(0)) > 430
    assert 0.9 < plan.fill <= 1


def ids_of(plan: BatchPlan, epoch: int) -> list[int]:
    steps = range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch)
    return [index for step in steps for row in plan.ids_at(step)[1] for index in row.tolist()]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("en-de", ["en-de"]),
        ("en-de, fr-de ,en-de", ["en-de", "fr-de"]),
        ("en-de+fr", ["en-de", "en-fr"]),
        ("de+fr-en", ["de-en", "fr-en"]),
        ("en+de+fr", ["en-de", "en-fr", "de-en", "de-fr", "fr-en", "fr-de"]),
    ],
)
def test_pairs_expand_to_directions(pairs: str, expected: list[str]) -> None:
    assert [direction.pair for direction in DataConfig(pairs=pairs).directions()] == expected


SENTENCES = {
    "en": ["one house", "two houses", "a tree"],
    "de": ["ein Haus", "zwei Häuser", "ein Baum"],
    "fr": ["une maison", "deux maisons", "un arbre"],
}


def write(folder: Path, pattern: str, pair: str, copies: int = 40) -> None:
    for lang in pair.split("-"):
        for split in ("train", "valid"):
            path = folder / pattern.format(split=split, pair=pair, lang=lang)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(SENTENCES[lang] * copies) + "\n", encoding="utf-8")


@pytest.mark.parametrize("tags", ["source", "target", "both", "each"])
def test_tags_come_before_the_tagged_side(tmp_path: Path, tags: str) -> None:
    write(tmp_path, "{pair}/{split}.{lang}", "de-en")
    write(tmp_path, "{pair}/{split}.{lang}", "en-fr", 20)
    config = DataConfig(
        source="text", path=str(tmp_path), files="{pair}/{split}.{lang}", pairs="de+fr-en,en-de+fr", tags=tags
    )
    log: list[str] = []
    corpus = prepare(_small(config), tmp_path / "run", log.append)
    pieces = corpus.tokenizer.source_pieces
    assert [direction.pair for direction in corpus.validated] == ["de-en", "fr-en", "en-de", "en-fr"]
    for direction, store in zip(corpus.validated, corpus.train.stores, strict=True):
        pairs = list(read_pairs(direction, "train"))
        for side, line in zip(("source", "target"), pairs[0], strict=True):
            tokens = store.gather(side, np.array([0]))
            lang = direction.source_lang if (tags, side) == ("each", "source") else direction.target_lang
            tag = [pieces.index(f">>{lang}<<")] if tags in (side, "both", "each") else []
            assert tokens.tolist() == tag + corpus.tokenizer.encode_source([line])[0]
    assert pieces[3:6] == [f">>{lang}<<" for lang in corpus.tokenizer.languages] == [">>de<<", ">>en<<", ">>fr<<"]
    # Text is never encoded as a tag, and a tag is never printed.
    german = pieces.index(">>de<<")
    assert german not in corpus.tokenizer.encode_source([">>de<< one house"])[0]
    assert corpus.tokenizer.decode_target([german, *corpus.tokenizer.encode_target(["ein Haus"])[0]]) == "ein Haus"
    assert any("sentence pairs per epoch: 120 of de-en, 60 of fr-en, 120 of en-de, 60 of en-fr" in line for line in log)
    again = prepare(_small(config), tmp_path / "run", log.append)
    assert again.identity() == corpus.identity()
    assert all(store.reused for store in again.train.stores)


def test_sides_with_only_a_tag_count_as_empty(tmp_path: Path) -> None:
    write(tmp_path, "{split}.{lang}", "en-de")
    (tmp_path / "train.en").write_text("\n" + "one house\n" * 119, encoding="utf-8")
    corpus = prepare(
        _small(DataConfig(source="text", path=str(tmp_path), pairs="en-de", tags="both")), tmp_path / "run", print
    )
    assert corpus.train.stores[0].counts["empty"] == 1


def test_languages_without_a_tag_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, "{split}.{lang}", "en-de")
    config = _small(DataConfig(source="text", path=str(tmp_path), pairs="en-de"))
    corpus = prepare(config, tmp_path / "run", print)
    with pytest.raises(UserError, match="not trained to translate to 'fr'; its languages are de"):
        corpus.tokenizer.tags(config, "en", "fr")
    with pytest.raises(UserError, match="not trained to translate from 'en'; its languages are de"):
        corpus.tokenizer.tags(dataclasses.replace(config, tags="each"), "en", "de")


def _small(config: DataConfig) -> DataConfig:
    return dataclasses.replace(config, vocab_size=40, vocab_type="bpe")
