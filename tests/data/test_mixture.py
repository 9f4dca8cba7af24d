"""Mixtures of corpora: sampling rates, tags and files."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax import config as configs
from branchnorm_jax.data.batches import BatchPlan, make_plans
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.mixture import Mixture, repeats
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.store import TokenStore
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import EOS, PAD


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


def mixture_of(stores: list[TokenStore], temperature: float) -> Mixture:
    """Returns the mixture of directions with one corpus each."""
    return Mixture(stores, repeats(np.array([[len(store)] for store in stores]), [1], temperature)[:, 0].tolist())


@settings(max_examples=30)
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


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from([1.0, 1.5, 5.0, 100.0]),
    st.integers(0, 99),
)
def test_epochs_draw_by_temperature_and_evenly(sizes: list[int], temperature: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    mixture = mixture_of([random_store(random, size) for size in sizes], temperature)
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


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.sampled_from([0.5, 1.0, 1.3, 2.0, 7.0])), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_weights_say_how_often_a_pair_is_drawn(corpora: list[tuple[int, float]], seed: int) -> None:
    random, least = np.random.default_rng(seed), min(weight for _, weight in corpora)
    times = repeats(np.array([[size for size, _ in corpora]]), [weight for _, weight in corpora], 1.0)
    mixture = Mixture([random_store(random, size) for size, _ in corpora], times[0].tolist())
    for epoch in range(3):
        counts = np.bincount(mixture.drawn(epoch), minlength=mixture.starts[-1])
        for (size, weight), start in zip(corpora, mixture.starts, strict=False):
            inside = counts[start : start + size]
            assert abs(inside.sum() - size * weight / least) < 0.501
            assert inside.min() >= 1
            if float(weight / least).is_integer():
                assert set(inside.tolist()) == {weight / least}


def test_weights_apply_within_a_direction_and_temperature_between_directions() -> None:
    sizes, weights, temperature = np.array([[100, 900], [40, 10], [3000, 1]]), [3, 1], 2.5
    times = repeats(sizes, weights, temperature)
    np.testing.assert_allclose(times[:, 0], 3 * times[:, 1])
    totals = (sizes * times).sum(1)
    shares = (3 * sizes[:, 0] + sizes[:, 1]) ** (1 / temperature)
    np.testing.assert_allclose(totals / totals.sum(), shares / shares.sum())
    assert times.min() == 1


def test_batches_contain_the_drawn_sentences() -> None:
    random = np.random.default_rng(0)
    train = mixture_of([random_store(random, size) for size in (400, 30)], 5.0)
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
    each = "120 of de-en (33.3%), 60 of fr-en (16.7%), 120 of en-de (33.3%), 60 of en-fr (16.7%)"
    assert f"sentence pairs per epoch: {each}" in log
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


def write_corpora(folder: Path) -> DataConfig:
    """Writes three corpora in three formats, and validation text in a fourth; returns a config that reads them."""
    texts = {name: [f"{name} {number}" for number in range(size)] for name, size in (("a", 40), ("b", 30), ("c", 20))}
    (folder / "web").mkdir(parents=True)
    for lang in ("en", "de"):
        (folder / f"news.{lang}").write_text("".join(f"{lang} {line}\n" for line in texts["a"]))
        (folder / "web" / f"all.{lang}").write_text("".join(f"{lang} {line}\n" for line in texts["b"]))
    made = [json.dumps({"en": f"en {line}", "de": f"de {line}"}) for line in texts["c"]]
    (folder / "made.jsonl").write_text("\n".join([*made, made[0], json.dumps({"en": "en a 3", "de": "de a 3"})]))
    (folder / "valid.tsv").write_text("en\tde\nen a 7\tde a 7\nen d\tde d\n")
    return DataConfig(
        source="text",
        path=str(folder),
        files="{split}",
        train_split="news.{lang}:4, web/*.{lang}:2 ,made.jsonl",
        valid_split="valid.tsv",
        vocab_size=40,
        vocab_type="bpe",
        row_multiple=2,
    )


def test_several_corpora_of_one_pair(tmp_path: Path) -> None:
    """Each batch is a function of step and seed; an epoch has each pair as often as its weight says."""
    config, log = write_corpora(tmp_path / "text"), list[str]()
    corpus = prepare(config, tmp_path / "run", log.append)
    names = "news.{lang}", "web/*.{lang}", "made.jsonl"
    for name, count in zip(names, (40, 30, 22), strict=True):
        assert f"train {name}: {count} pairs read, {count} kept, 0 longer than 256 tokens, 0 with an empty side" in log
    each = "160 of news.{lang} (66.1%), 60 of web/*.{lang} (24.8%), 22 of made.jsonl (9.1%)"
    assert log[-1] == f"sentence pairs per epoch: {each}"
    again = prepare(config, tmp_path / "run", log.append)
    assert again.identity() == corpus.identity()
    plan, reopened = (make_plans(config, one.train, one.valid, 64, 3)[0] for one in (corpus, again))
    assert all(store.reused for store in again.train.stores)
    seen = Counter[str]()
    for step in reversed(range(2 * plan.batches_per_epoch)):
        batch, other = plan.batch_at(step), reopened.batch_at(step)
        assert all(np.array_equal(side, same) for side, same in zip(batch, other, strict=True))
        if step < plan.batches_per_epoch:
            tokens = batch.source[batch.source != PAD]
            ids = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]
            seen.update(corpus.tokenizer.source_processor.decode(each.tolist()) for each in ids)
    expected = {
        f"en {name} {i}": n for name, size, n in (("a", 40, 4), ("b", 30, 2), ("c", 20, 1)) for i in range(size)
    }
    assert seen == expected | {"en c 0": 2, "en a 3": 5}


def test_the_report_covers_each_corpus(tmp_path: Path) -> None:
    log: list[str] = []
    reports = prepare(write_corpora(tmp_path / "text"), tmp_path / "run", log.append).reports["en-de"]
    assert {name: one["pairs"] for name, one in reports.items()} == {
        **{"train news.{lang}": 40, "train web/*.{lang}": 30, "train made.jsonl": 22},
        "valid": 2,
    }
    held_out = {"line": 8, "pairs": 1, "source": "en a 7", "target": "de a 7"}
    assert reports["train news.{lang}"]["faults"]["held_out"] == held_out
    # One pair occurred before in the corpus itself, and one in another corpus.
    assert reports["train made.jsonl"]["faults"]["duplicate"]["pairs"] == 2
    assert "train made.jsonl: 2 pairs that occurred before, first in pair 21: en c 0 | de c 0" in log


def test_a_misspelt_corpus_is_one_line(tmp_path: Path) -> None:
    config = write_corpora(tmp_path / "text")
    wrong = dataclasses.replace(config, train_split="news.{lang}:2,med.jsonl")
    with pytest.raises(UserError, match=r"no file matches med\.jsonl .*contains made\.jsonl, news\.de, .*train_split"):
        prepare(wrong, tmp_path / "run", print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("train_split", "message"),
    [
        ("news:2,", "a corpus has no name"),
        (":2", "a corpus has no name"),
        ("news:2,web,news", "news is there twice"),
        ("news:0,web", "weights must be above 0"),
        ("news:-1,web", "weights must be above 0"),
        ("news:nan,web", "weights must be above 0"),
        ("news:inf", "weights must be above 0"),
        ("news:1001,web", "at most 1000 times"),
    ],
)
def test_wrong_weights_are_rejected(train_split: str, message: str) -> None:
    values = configs.default_config()
    values.data.update(source="text", train_split=train_split)
    with pytest.raises(UserError, match=message):
        configs.from_config_dict(values)


def test_the_built_in_corpus_is_a_single_one() -> None:
    values = configs.default_config()
    values.data.train_split = "a,b"
    with pytest.raises(UserError, match="the built-in corpus is a single one"):
        configs.from_config_dict(values)


@pytest.mark.parametrize("name", ["train", "train[:50%]", "wmt14_translate/de-en:test", "train[10:20]"])
def test_names_of_tfds_have_no_weight(name: str) -> None:
    corpora = DataConfig(train_split=f"{name},{name}:0.5").corpora()
    assert [(corpus.train_split, weight) for corpus, weight in corpora] == [(name, 1.0), (name, 0.5)]


def _small(config: DataConfig) -> DataConfig:
    return dataclasses.replace(config, vocab_size=40, vocab_type="bpe")
