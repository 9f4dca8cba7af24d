"""Tokenizer: training with SentencePiece, loading, encoding and decoding."""

import dataclasses
import functools
import hashlib
import io
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from branchnorm_jax.codes import near
from branchnorm_jax.data import bpe
from branchnorm_jax.data.normalization import changes, describe, normalizer, with_rule
from branchnorm_jax.errors import UserError, some
from branchnorm_jax.files import atomic_directory, write_atomically
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import EOS, PAD, UNK

T = TypeVar("T")

UNUSED = "unused_target.txt"
"""File next to a vocabulary that lists the ids of unused target pieces, one per line."""

ABSENT = "absent_target.txt"
"""The same for the pieces of an imported vocabulary that its model does not have. They stay unused in fine-tuning."""

ORIGIN = "made_of.json"
"""File next to a vocabulary that records the text and the options it was trained with."""

TAG = re.compile(r">>([^<>\s]+)<<")
"""Language tag, in the notation of Marian and Hugging Face."""


class Tags(NamedTuple):
    """Language tags: token ids prepended to the source and to the target sentence."""

    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()


NO_TAGS = Tags()

# Unigram training sums floats per thread, so the number of threads is fixed to get the same vocabulary everywhere.
_TRAIN_THREADS = 8
_ENCODE_THREADS = min(8, os.cpu_count() or 1)

# Training time is quadratic in the longest line, so longer lines are split at white space. This hardly changes the
# result, because SentencePiece counts words. A single longer "word" is split anywhere.
_LINE_CHARACTERS = 1000
_CUT = re.compile(rf"\S(?:.{{0,{_LINE_CHARACTERS - 2}}}\S)?(?!\S)|\S{{1,{_LINE_CHARACTERS}}}", re.DOTALL)
_PIECE_CHARACTERS = 16
"""Largest number of characters of a piece."""

_BREAKS = re.compile(r"[\r\n]+")
_RESERVED = str.maketrans("\0\u2585", "  ")  # SentencePiece silently skips lines that contain its unknown symbol


Processor = sentencepiece.SentencePieceProcessor | bpe.MosesBPE
"""The tokenizer of one side."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Converts text to token ids and back; thread-safe.

    Attributes:
      source_processor: processor of the source language.
      target_processor: processor of the target language; the same object for a shared vocabulary.
      sha256: hash of the vocabulary.
      unused_target: ids of pieces that never occur in the target side of the training text, ascending; empty if
        unknown.
      absent_target: ids of target pieces that the model of an imported vocabulary does not have, ascending.
    """

    source_processor: Processor
    target_processor: Processor
    sha256: str
    unused_target: tuple[int, ...] = ()
    absent_target: tuple[int, ...] = ()

    @property
    def source_size(self) -> int:
        """Size of the source vocabulary, including PAD, EOS and UNK."""
        return self.source_processor.get_piece_size()

    @property
    def target_size(self) -> int:
        """Size of the target vocabulary, including PAD, EOS and UNK."""
        return self.target_processor.get_piece_size()

    @property
    def source_pieces(self) -> list[str]:
        """The pieces of the source vocabulary in order of id."""
        return _pieces(self.source_processor)

    @property
    def target_pieces(self) -> list[str]:
        """The pieces of the target vocabulary in order of id."""
        return _pieces(self.target_processor)

    def source_pieces_of(self, ids: list[int]) -> list[str]:
        """Returns the pieces of source token ids."""
        return self.source_processor.id_to_piece(ids)

    def target_pieces_of(self, ids: list[int]) -> list[str]:
        """Returns the pieces of target token ids."""
        return self.target_processor.id_to_piece(ids)

    @functools.cached_property
    def languages(self) -> list[str]:
        """Languages that have a tag."""
        return leading_tags(self.target_pieces)

    def tags(self, config: DataConfig, source_lang: str, target_lang: str) -> Tags:
        """Returns the tags of a direction, see `data.tags`.

        A model of a single language pair has no tags. The source language matters only for `data.tags=each`.

        Raises:
          UserError: if the vocabulary has no tag for a language.
        """
        if not config.pairs or config.tags == "none":
            return NO_TAGS
        sides = ("source", "target") if config.tags in ("both", "each") else (config.tags,)
        processors = {"source": self.source_processor, "target": self.target_processor}
        tokens = {}
        for side in sides:
            own = config.tags == "each" and side == "source"
            lang = source_lang if own else target_lang
            tokens[side] = (processors[side].piece_to_id(f">>{lang}<<"),)
            if tokens[side] == (UNK,):
                way = "from" if own else "to"
                meant = " or ".join(near(lang, self.languages))
                hint = f"did you mean {meant}?" if meant else f"its languages are {some(self.languages)}"
                raise UserError(f"this model was not trained to translate {way} {lang!r}; {hint}")
        return Tags(**tokens)

    @property
    def has_codes(self) -> bool:
        """Whether text is split by codes, and not by SentencePiece."""
        return isinstance(self.target_processor, bpe.MosesBPE)

    @property
    def exported(self) -> dict[str, bytes]:
        """Names and contents of the files with which other programs split text."""
        return _exported("source", self.source_processor) | _exported("target", self.target_processor)

    @property
    def models(self) -> tuple[bytes, bytes]:
        """Serialised models of source and target, as in their files."""
        source, target = self.source_processor.serialized_model_proto(), self.target_processor.serialized_model_proto()
        return source, target

    @property
    def spm(self) -> tuple[sentencepiece.SentencePieceProcessor, sentencepiece.SentencePieceProcessor]:
        """The processors of source and target, for sampling. Raises `UserError` unless they are SentencePiece's."""
        source, target = self.source_processor, self.target_processor
        if isinstance(source, bpe.MosesBPE) or isinstance(target, bpe.MosesBPE):
            raise UserError("config: data.subword_samples needs the probabilities of pieces, which codes do not have")
        if not all(_is_unigram(each) for each in (source, target)):
            raise UserError("config: data.subword_samples needs a unigram vocabulary, and this one is not")
        return source, target

    def encode_source(self, lines: list[str]) -> list[list[int]]:
        """Returns the token ids of each source line, EOS appended.

        An empty line gives [EOS].
        """
        return self.source_processor.encode(lines)

    def encode_target(self, lines: list[str]) -> list[list[int]]:
        """Returns the token ids of each target line, EOS appended.

        An empty line gives [EOS].
        """
        return self.target_processor.encode(lines)

    def text(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids up to the first EOS, with its line breaks, and without PAD and tags."""
        return str(self.target_processor.decode([int(token) for token in itertools.takewhile(lambda t: t != EOS, ids)]))

    def decode_target(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids up to the first EOS, as one line."""
        # Byte pieces (byte_fallback) can form line breaks, but each input line must give one output line.
        return _BREAKS.sub(" ", self.text(ids).strip("\r\n"))


def leading_tags(pieces: Sequence[str]) -> list[str]:
    """Returns the languages that have a tag in a vocabulary.

    Tags are control symbols. SentencePiece places control symbols directly after UNK.
    """
    tags = itertools.takewhile(TAG.fullmatch, pieces[UNK + 1 :])
    return [match[1] for match in map(TAG.fullmatch, tags) if match]


def _pieces(processor: Processor) -> list[str]:
    return processor.id_to_piece([*range(processor.get_piece_size())])


def _is_unigram(processor: sentencepiece.SentencePieceProcessor) -> bool:
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(processor.serialized_model_proto())
    return bool(model.trainer_spec.model_type == model.trainer_spec.UNIGRAM)


def _exported(side: str, processor: Processor) -> dict[str, bytes]:
    if isinstance(processor, bpe.MosesBPE):
        return {f"{side}.codes": processor.codes()}
    return {f"{side}.spm": processor.serialized_model_proto()}


def train_tokenizer(
    config: DataConfig,
    pairs: Iterable[tuple[str, str]],
    directory: Path,
    origin: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Tokenizer:
    """Trains a vocabulary on sentence pairs and writes it to `directory`.

    Existing contents of the directory are replaced. The same pairs and options give a byte-identical vocabulary. Each
    side has its own normalisation (`normalization.py`), which is part of its model: a shared vocabulary has the same
    pieces for both sides. Every character of the normalised training text gets a piece, except NUL and U+2585, which
    SentencePiece cannot learn. If there are more than `config.vocab_sentences` sentences (both sides count for a shared
    vocabulary), only every 2nd, 4th, ... pair is used, evenly over the whole corpus. Pairs that training leaves out
    anyway are not used: those with an empty side, and those with more characters than `config.max_length` pieces of 16,
    the longest, can have.

    With `config.pairs`, the tag of each language that needs one is a control symbol: encoding text never produces it,
    and decoding never prints it.

    The files are `source.model` and `target.model`, or `vocab.model` if they are the same; a readable `.vocab` with
    pieces and scores for each model; and `made_of.json` with `origin`, if it is given. `say` is called with a line
    about the characters of a side that its normalisation changes.

    Raises:
      UserError: if the text is empty, or `config.vocab_size` is too large or too small for it.
      StorageError: if the files cannot be written.
    """
    most = config.vocab_sentences // 2 if config.shared_vocab else config.vocab_sentences
    rules = {"source": config.source_normalization, "target": config.target_normalization}
    longest = _PIECE_CHARACTERS * config.max_length
    fitting = (pair for pair in pairs if min(map(len, pair)) and max(map(len, pair)) <= longest)
    texts = dict(zip(rules, zip(*_even_sample(fitting, most), strict=True), strict=False))
    for side, text in texts.items():
        if changed := changes(rules[side], text):
            say(describe(side, rules[side], changed))
    normalised = {side: map(normalizer(rules[side]).normalize, text) for side, text in texts.items()}
    if config.shared_vocab:
        both = itertools.chain.from_iterable(zip(*normalised.values(), strict=True))
        shared = _train(config, both, "training text")
        models = {side: with_rule(shared, rule) for side, rule in rules.items()}
        models = models if len(set(models.values())) > 1 else {"vocab": models["source"]}
    else:
        models = {
            side: with_rule(_train(config, normalised.get(side, ()), f"{side} side"), rule)
            for side, rule in rules.items()
        }
    return _written(models, directory, origin)


def train_text_tokenizer(config: DataConfig, texts: Iterable[str], directory: Path, origin: str = "") -> Tokenizer:
    """Trains the vocabulary of a language model on lines of text and writes it to `directory`.

    It changes no text, and a line feed is a piece. With `data.vocab_type=bytes`, there is nothing to train. Arguments,
    files and errors are those of `train_tokenizer`.
    """
    if config.vocab_type == "bytes":
        return _written({"vocab": byte_model()}, directory, origin)
    lines = _even_sample((line for text in texts if (line := text.removesuffix("\n"))), config.vocab_sentences)
    return _written({"vocab": _train(config, lines, "training text", whole=True)}, directory, origin)


def _written(models: Mapping[str, bytes], directory: Path, origin: str) -> Tokenizer:
    """Writes the files of a vocabulary and loads it."""
    with atomic_directory(directory) as temporary:
        for name, model in models.items():
            (temporary / f"{name}.model").write_bytes(model)
            (temporary / f"{name}.vocab").write_text(readable(model), encoding="utf-8")
        if origin:
            (temporary / ORIGIN).write_text(origin, encoding="utf-8")
    return load_tokenizer(directory)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Loads a vocabulary written by `train_tokenizer`.

    Raises `UserError` if it is missing or corrupt.
    """
    shared = directory / "vocab.model"
    paths = [shared] if shared.exists() else [directory / "source.model", directory / "target.model"]
    try:
        models = [path.read_bytes() for path in paths]
    except OSError as error:
        wanted = "expected a readable vocab.model, or source.model and target.model"
        raise UserError(f"{directory}: no vocabulary found, {wanted} ({error.strerror})") from error
    processors = [_processor(model, path) for model, path in zip(models, paths, strict=True)]
    sha256 = hashlib.sha256(b"".join(models)).hexdigest()
    return Tokenizer(processors[0], processors[-1], sha256, *(_ids(directory / name) for name in (UNUSED, ABSENT)))


def _ids(path: Path) -> tuple[int, ...]:
    """Reads a list of ids, one per line; empty if there is no such file."""
    if not path.exists():
        return ()
    try:
        return tuple(int(line) for line in path.read_text().splitlines() if not line.startswith("#"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it and resume training") from error


def with_unused(
    tokenizer: Tokenizer, fingerprints: Sequence[str], used_target: Callable[[], np.ndarray], directory: Path
) -> Tokenizer:
    """Sets the target pieces that a training text does not have, and records them in `directory`.

    A record for the same text is not made again.

    Args:
      tokenizer: the vocabulary.
      fingerprints: those of the token stores of the text.
      used_target: computes the target pieces of the text.
      directory: the folder of the vocabulary.
    """
    path, mark = directory / UNUSED, f"# {hashlib.sha256(' '.join(fingerprints).encode()).hexdigest()}"
    if path.exists() and path.read_text().partition("\n")[0] == mark:
        return tokenizer
    ids = np.setdiff1d(np.arange(tokenizer.target_size), [*used_target(), PAD, EOS, UNK])
    write_atomically(path, "".join(f"{line}\n" for line in (mark, *ids)))
    return dataclasses.replace(tokenizer, unused_target=tuple(ids.tolist()))


def _processor(model: bytes, path: Path) -> Processor:
    if model.startswith(b"{"):
        return bpe.load(model, path)
    try:
        if not model:
            raise RuntimeError("empty file")
        processor = sentencepiece.SentencePieceProcessor(model_proto=model, add_eos=True, num_threads=_ENCODE_THREADS)
    except RuntimeError as error:
        raise UserError(f"{path}: not a valid SentencePiece model; delete {path.parent} to train it again") from error
    ids = (processor.pad_id(), processor.eos_id(), processor.unk_id())
    if ids != (PAD, EOS, UNK):
        raise UserError(
            f"{path}: the ids of <pad>, </s>, <unk> are {ids} instead of {(PAD, EOS, UNK)}; train the vocabulary with "
            "this project"
        )
    return processor


def _even_sample(items: Iterable[T], most: int) -> list[T]:
    """Returns every 2^k-th item, for the smallest k that gives at most `most` items."""
    chosen: list[T] = []
    stride = 1
    for index, item in enumerate(items):
        if index % stride == 0:
            chosen.append(item)
        if len(chosen) > most:
            chosen, stride = chosen[::2], 2 * stride
    return chosen


def byte_model() -> bytes:
    """Returns a SentencePiece model with one piece for each byte, after <pad>, </s> and <unk>. It changes no text."""
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    kinds = model.SentencePiece
    special = [("<pad>", kinds.CONTROL), ("</s>", kinds.CONTROL), ("<unk>", kinds.UNKNOWN)]
    for piece, kind in [*special, *((f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256))]:
        model.pieces.add(piece=piece, type=kind, score=0.0)
    trainer, normalizer_spec = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, True
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = PAD, EOS, UNK, -1
    normalizer_spec.name = "identity"
    normalizer_spec.add_dummy_prefix = normalizer_spec.remove_extra_whitespaces = False
    normalizer_spec.escape_whitespaces = False
    return model.SerializeToString()


def _training_lines(text: Iterable[str]) -> Iterator[str]:
    for line in text:
        line = line.translate(_RESERVED)
        yield from _CUT.findall(line) if len(line) > _LINE_CHARACTERS else (line,)


def _apart(function: Callable[..., None], **arguments: Any) -> None:
    """Calls a function in another thread, so that signals are handled while it runs, in this thread.

    SentencePiece takes minutes, and turns any exception in its iterator into a `RuntimeError`.
    """
    end = Future[None]()

    def call() -> None:
        try:
            function(**arguments)
            end.set_result(None)
        except BaseException as error:
            end.set_exception(error)

    threading.Thread(target=call, daemon=True, name="vocabulary").start()
    end.result()


def _train(config: DataConfig, text: Iterable[str], text_of: str, whole: bool = False) -> bytes:
    """Trains a model without normalisation on normalised text.

    `text_of`: what the text is, for errors. `whole`: lines are parts of a text, so a line feed is a piece, and no space
    is added at the start of a line.
    """
    model = io.BytesIO()
    try:
        _apart(
            sentencepiece.SentencePieceTrainer.train,
            sentence_iterator=_training_lines(text),
            model_writer=model,
            vocab_size=config.vocab_size,
            model_type=config.vocab_type,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=config.byte_fallback,
            character_coverage=1.0,
            max_sentencepiece_length=_PIECE_CHARACTERS,
            max_sentence_length=4 * _LINE_CHARACTERS,  # bytes
            num_threads=_TRAIN_THREADS,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=-1,
            pad_piece="<pad>",
            eos_piece="</s>",
            unk_piece="<unk>",
            control_symbols=[f">>{lang}<<" for lang in config.tagged],
            # SentencePiece does not see a carriage return at the end of a line, so it would be unknown.
            user_defined_symbols=["\n", "\r"] if whole else [],
            add_dummy_prefix=not whole,
            minloglevel=2,
        )
    except RuntimeError as error:
        fault = f"config: data.vocab_size={config.vocab_size} is too"
        if match := re.search(r"set it to a value <= (\d+)", str(error)):
            raise UserError(f"{fault} large for the {text_of}, which supports at most {match[1]} pieces") from error
        if match := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
            raise UserError(f"{fault} small for the {text_of}: its characters alone need {match[1]} pieces") from error
        if "sentences_.empty()" in str(error) or "all_chars_count" in str(error):
            raise UserError(
                f"the {text_of} has nothing to train a vocabulary on: it is empty, or its pairs have an empty side or "
                f"more than {_PIECE_CHARACTERS} x data.max_length characters"
            ) from error
        raise
    return model.getvalue()


def readable(model: bytes) -> str:
    """Returns the pieces of a serialised SentencePiece model with their scores, one per line."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.get_piece_size())
    return "".join(f"{processor.id_to_piece(i)}\t{processor.get_score(i):.6g}\n" for i in ids)
