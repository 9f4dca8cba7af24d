"""The vocabulary of a model, and the files of a tokenizer of `transformers` that splits text as it does.

`importing/multilingual.py` and `importing/t5.py` read the same files.
"""

import json
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sentencepiece import sentencepiece_model_pb2

from branchnorm_jax.tokens import EOS, PAD, UNK

SPM, VOCAB = "sentencepiece.bpe.model", "vocab.json"
"""Files of multilingual models."""

FIRST = ("<s>", "<pad>", "</s>", "<unk>")
"""The first pieces of fairseq's vocabularies, by which an imported multilingual model is recognised."""

LANGUAGES: dict[str, list[str]] = {
    name: codes.split()
    for name, codes in tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8")).items()
}
"""Languages in the order of their ids."""


TAGGED, PAIRS = "language_tags", "language_pairs"
"""Names of `data.tags` and `data.pairs` in tokenizer_config.json."""


class Vocabulary(NamedTuple):
    """The vocabularies of both sides, in the order of our ids."""

    source: list[str]
    """Pieces."""
    target: list[str]
    models: tuple[bytes, bytes]
    """Serialised SentencePiece models of source and target."""
    tags: int = 0
    """Number of language tags, whose ids follow UNK."""
    source_lang: str = ""
    """Languages of the translation, if nothing else is said."""
    target_lang: str = ""
    begins: str = ""
    """The tag with which every translation begins; "" if there is none, or if the user has to choose it."""
    tagged: str = ""
    """`data.tags`, where an export and `--mode=import` should keep it."""
    pairs: str = ""
    """`data.pairs`, likewise."""

    @property
    def languages(self) -> list[str]:
        """Languages that have a tag, without its brackets."""
        return [piece[2:-2] for piece in self.source[UNK + 1 : UNK + 1 + self.tags]]

    def extended(self, piece: str) -> "Vocabulary":
        """Returns the vocabulary with one more piece on each side."""
        return self._replace(source=[*self.source, piece], target=[*self.target, piece])


class Tokenizer(NamedTuple):
    """A tokenizer of `transformers`."""

    source: list[int]
    """Its id of a source piece -> our id."""
    target: list[int]
    options: dict[str, Any]
    """Content of tokenizer_config.json."""
    files: dict[str, bytes]


def parsed(spm: bytes) -> Any:
    """Returns a SentencePiece model as a message of protocol buffers."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(spm)
    return proto


def encoded(content: Any) -> bytes:
    """Returns the content of a JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def marian(vocabulary: Vocabulary, first: Sequence[int], shared: bool) -> Tokenizer:
    """Returns a MarianTokenizer, which suits any model: it calls SentencePiece, and looks ids up in a list.

    Args:
      vocabulary: our pieces.
      first: PAD, EOS and UNK in the order of their ids there; all other tokens have our ids.
      shared: both sides have the same list.
    """
    rows = [[*first, *range(len(first), len(pieces))] for pieces in (vocabulary.source, vocabulary.target)]
    files = {f"{side}.spm": spm for side, spm in zip(("source", "target"), vocabulary.models, strict=True)}
    for name, pieces, ids in ((VOCAB, vocabulary.source, rows[0]), ("target_vocab.json", vocabulary.target, rows[1])):
        if name == VOCAB or not shared:
            files[name] = encoded({pieces[ours]: theirs for theirs, ours in enumerate(ids)})
    options = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": vocabulary.source_lang,
        "target_lang": vocabulary.target_lang,
        "separate_vocabs": not shared,
        "unk_token": vocabulary.source[UNK],
        "eos_token": vocabulary.source[EOS],
        "pad_token": vocabulary.source[PAD],
    }
    if vocabulary.tags:  # for our own import; `transformers` ignores them
        options |= {TAGGED: vocabulary.tagged, PAIRS: vocabulary.pairs}
    return Tokenizer(rows[0], rows[1], options, files)


def t5(vocabulary: Vocabulary) -> Tokenizer | None:
    """Returns a T5Tokenizer with our ids; None if the vocabulary does not suit the class."""
    model = parsed(vocabulary.models[0])
    if vocabulary.models[0] != vocabulary.models[1] or vocabulary.tags or not _is_unigram(model):
        return None
    # These are last. The class adds the former itself, and the latter have no pieces there.
    kept = [piece for piece in model.pieces if not piece.piece.startswith(("<extra_id_", "<unused_"))]
    del model.pieces[:]
    model.pieces.extend(kept)
    model.trainer_spec.vocab_size = len(kept)
    extra = sum(piece.startswith("<extra_id_") for piece in vocabulary.source)
    options = {
        "tokenizer_class": "T5Tokenizer",
        "extra_ids": extra,
        "additional_special_tokens": [f"<extra_id_{index}>" for index in range(extra)],
        "unk_token": vocabulary.source[UNK],
        "eos_token": vocabulary.source[EOS],
        "pad_token": vocabulary.source[PAD],
    }
    rows = list(range(len(vocabulary.source)))
    return Tokenizer(rows, rows, options, {"spiece.model": model.SerializeToString()})


def multilingual(vocabulary: Vocabulary, model_type: str, never: Collection[int]) -> Tokenizer | None:
    """Returns the tokenizer of M2M-100, NLLB or mBART-50; None if the vocabulary does not suit any of them.

    Args:
      vocabulary: our pieces.
      model_type: m2m_100 or mbart.
      never: our ids of pieces that are never part of a text, and that a list of ids may leave out.
    """
    pieces = vocabulary.source
    if pieces != vocabulary.target or not vocabulary.tags or not {*FIRST} <= {*pieces}:
        return None
    model = parsed(vocabulary.models[0])
    kinds = model.SentencePiece
    first, tags = [pieces.index(piece) for piece in FIRST], [*range(UNK + 1, UNK + 1 + vocabulary.tags)]
    others = [index for index in range(len(pieces)) if index not in {*first, *tags}]
    control = [index for index in others if model.pieces[index].type == kinds.CONTROL]
    text = [index for index in others if model.pieces[index].type != kinds.CONTROL]
    options: dict[str, Any] = {"src_lang": vocabulary.source_lang or None, "tgt_lang": vocabulary.target_lang or None}
    files = {SPM: _with_fairseq_ids(model, text)}
    suits: dict[str, Callable[[], bool]] = {
        "m2m100": lambda: model_type == "m2m_100" and vocabulary.languages == LANGUAGES["m2m100"],
        "wmt21": lambda: model_type == "m2m_100" and vocabulary.languages == LANGUAGES["wmt21"],
        "nllb": lambda: model_type == "m2m_100" and not _is_unigram(model),
        "mbart50": lambda: model_type == "mbart" and vocabulary.languages == LANGUAGES["mbart50"],
    }
    name = next((name for name, holds in suits.items() if holds()), "")
    if name in ("m2m100", "wmt21"):
        text = [index for index in text if index not in never]
        files[VOCAB] = encoded({pieces[ours]: theirs for theirs, ours in enumerate([*first, *text])})
        options |= {"tokenizer_class": "M2M100Tokenizer", "language_codes": name}
    elif name:
        added = [*vocabulary.languages, *(pieces[index] for index in control if pieces[index] == "<mask>")]
        options |= {"tokenizer_class": {"nllb": "NllbTokenizer", "mbart50": "MBart50Tokenizer"}[name]}
        options["added_tokens_decoder"] = {
            str(index): {"content": piece, "special": True}
            for index, piece in enumerate(added, start=len(first) + len(text))
        }
        if name == "nllb":
            options["extra_special_tokens"] = vocabulary.languages
    rows = [*first, *text, *tags, *control]
    return Tokenizer(rows, rows, options, files) if name else None


def _is_unigram(model: Any) -> bool:
    return bool(model.trainer_spec.model_type == model.trainer_spec.UNIGRAM and not model.trainer_spec.byte_fallback)


def _with_fairseq_ids(model: Any, text: Sequence[int]) -> bytes:
    """Returns a serialised SentencePiece model with <unk>, <s> and </s>, followed by the pieces with the ids `text`."""
    kinds, other = model.SentencePiece, type(model)()
    other.CopyFrom(model)
    del other.pieces[:]
    special = {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}
    other.pieces.extend(kinds(piece=piece, score=0.0, type=kind) for piece, kind in special.items())
    other.pieces.extend(model.pieces[index] for index in text)
    trainer = other.trainer_spec
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 0, 1, 2, -1
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece, trainer.pad_piece = *special, "<pad>"
    trainer.vocab_size = len(other.pieces)
    return other.SerializeToString()
