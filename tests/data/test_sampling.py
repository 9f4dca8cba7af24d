"""Subword regularisation: samples match SentencePiece's distribution and depend only on the line number."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from branchnorm_jax.data.batches import make_plans
from branchnorm_jax.data.numerals import pairs
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.sampling import Sampler
from branchnorm_jax.data.tokenizer import Tokenizer, train_tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import UNK

CONFIG = DataConfig(vocab_size=300, numerals_pairs=400)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(CONFIG, pairs("train", "en", "de", 400), tmp_path_factory.mktemp("sampling") / "v")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [target for _, target in pairs("train", "en", "de", 200)]


@settings(max_examples=50)
@given(st.lists(st.text(max_size=20), max_size=5), st.integers(0, 9))
def test_sampling_preserves_the_text(tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
    drawn = Sampler(tokenizer.spm[0], 0.0, (seed,)).encode(texts, 0)
    best = tokenizer.encode_source(texts)
    # The most likely piece of an unknown character is <unk>, in both encodings.
    assert [tokenizer.decode_target(ids) for ids in drawn] == [tokenizer.decode_target(ids) for ids in best]


def test_repeated_spaces_are_kept_as_without_sampling(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, source_normalization="identity", target_normalization="identity")
    text = [("a b", "a b"), *pairs("train", "en", "de", 400)]
    processor = train_tokenizer(config, text, tmp_path / "v").spm[1]
    lines = ["zwei  Leerzeichen", "   am Anfang", "eins"]
    drawn = Sampler(processor, 0.0, (3,)).encode(lines, 0)
    assert [processor.decode(ids) for ids in drawn] == [processor.decode(ids) for ids in processor.encode(lines)]
    assert processor.decode(drawn[0]) == lines[0]


def test_vocabularies_without_probabilities_are_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, vocab_type="bpe")
    tokenizer = train_tokenizer(config, pairs("train", "en", "de", 400), tmp_path / "v")
    with pytest.raises(UserError, match="needs a unigram vocabulary"):
        _ = tokenizer.spm


def test_unknown_pieces_are_as_improbable_as_in_sentencepiece(tokenizer: Tokenizer, lines: list[str]) -> None:
    """A vocabulary may lack pieces, even letters, that the best segmentation of no line needs."""
    lines = lines[:10]
    used = {piece for line in lines for piece in tokenizer.spm[1].encode(line, add_eos=False)}
    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.models[1])  # type: ignore[attr-defined]
    unused = [piece for number, piece in enumerate(model.pieces) if piece.type == piece.NORMAL and number not in used]
    for piece in unused:
        piece.type = piece.UNUSED
    processor = SentencePieceProcessor(model_proto=model.SerializeToString())
    assert any(len(piece.piece) == 1 for piece in unused)
    assert UNK not in {piece for line in lines for piece in processor.encode(line)}

    def share(encoded: list[list[int]]) -> float:
        return sum(ids.count(UNK) for ids in encoded) / sum(map(len, encoded))

    theirs = processor.encode(20 * lines, enable_sampling=True, alpha=0.2, nbest_size=64)
    assert share(theirs) < 0.01
    assert share(Sampler(processor, 0.2, (0,)).encode(20 * lines, 0)) < 0.01


def test_large_alpha_gives_the_best_tokenisation(tokenizer: Tokenizer, lines: list[str]) -> None:
    assert Sampler(tokenizer.spm[0], 1e4, (0,)).encode(lines, 0) == tokenizer.encode_source(lines)


@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_sampling_frequencies_match_sentencepiece(tokenizer: Tokenizer, alpha: float) -> None:
    word, count = "hundert", 20_000
    ours = Counter(tuple(ids[:-1]) for ids in Sampler(tokenizer.spm[0], alpha, (3,)).encode([word] * count, 0))
    theirs = Counter(
        tuple(tokenizer.spm[0].encode(word, add_eos=False, enable_sampling=True, alpha=alpha, nbest_size=64))
        for _ in range(count)
    )
    usual = [pieces for pieces, number in theirs.items() if number > 50]
    assert len(usual) > 3
    for pieces in usual:
        # The tolerance is five standard errors of the difference of two counts.
        assert abs(ours[pieces] - theirs[pieces]) < 5 * np.sqrt(2 * theirs[pieces]), pieces


def test_samples_depend_only_on_seed_and_line_number(tokenizer: Tokenizer, lines: list[str]) -> None:
    sampler = Sampler(tokenizer.spm[0], 0.2, (0, 1))
    whole = sampler.encode(lines, 1000)
    assert [ids for index, line in enumerate(lines) for ids in sampler.encode([line], 1000 + index)] == whole
    assert Sampler(tokenizer.spm[0], 0.2, (0, 1)).encode(lines, 1000) == whole
    assert Sampler(tokenizer.spm[0], 0.2, (1, 1)).encode(lines, 1000) != whole
    assert sampler.encode(lines, 0) != whole


def test_every_sentence_is_read_in_every_tokenisation(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, subword_samples=3)
    corpus = prepare(config, tmp_path, lambda line: None)
    stores = corpus.train.stores
    assert [len(store) for store in stores] == [400] * 3
    assert len({store.fingerprint for store in stores}) == 3
    drawn = [[store.gather("target", np.array([i])).tolist() for i in range(400)] for store in stores]
    first = [[corpus.tokenizer.decode_target(ids) for ids in sentences[:20]] for sentences in drawn]
    assert first[0] == first[1] == first[2]
    assert sum(one != other for one, other in zip(drawn[0], drawn[1], strict=True)) > 200
    plan, _ = make_plans(config, corpus.train, corpus.valid, 2048, 0)
    seen = [index for step in range(plan.batches_per_epoch) for row in plan.ids_at(step)[1] for index in row]
    assert sorted(seen) == list(range(1200))
    # Validation sentences are not sampled.
    sentence = next(pairs("valid", "en", "de", 1))[1]
    assert corpus.valid[0].gather("target", np.array([0])).tolist() == corpus.tokenizer.encode_target([sentence])[0]
