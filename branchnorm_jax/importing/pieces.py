"""SentencePiece models with the ids of another vocabulary."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from branchnorm_jax.data.tokenizer import TAG
from branchnorm_jax.errors import UserError
from branchnorm_jax.tokens import EOS, PAD, UNK


def parse(path: Path) -> Any:
    """Reads a SentencePiece model as a message of protocol buffers. Raises `UserError` if it is not one."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except Exception as error:  # protobuf's errors depend on its implementation
        raise UserError(f"{path}: not a SentencePiece model") from error
    if not proto.pieces:
        raise UserError(f"{path}: not a SentencePiece model")
    return proto


def ordered(ids: Mapping[str, int], special: Sequence[str], models: Sequence[Any]) -> list[str]:
    """Returns the pieces of a vocabulary in the order of this project.

    Special pieces come first, then language tags, then the others in the order of their ids, and in the end the pieces
    that only the SentencePiece models have.

    Args:
      ids: piece -> id in the other toolkit.
      special: its pieces for PAD, EOS and UNK.
      models: SentencePiece models that share the vocabulary.
    """
    others = sorted(ids.keys() - set(special), key=ids.__getitem__)
    more = sorted({piece for model in models for piece in _results(model)} - ids.keys())
    return [*special, *sorted(others, key=lambda piece: TAG.fullmatch(piece) is None), *more]


def with_pieces(model: Any, pieces: Sequence[str], never: Collection[str] = ()) -> bytes:
    """Returns a serialised SentencePiece model that splits text as `model` does, into pieces with other ids.

    Pieces that `model` does not have are never the result of splitting, but decoding knows them. Language tags become
    control symbols.

    Args:
      model: the model, which `parse` read.
      pieces: all pieces in the order of their ids; PAD, EOS and UNK come first.
      never: pieces of `model` that must not be the result of splitting any more.
    """
    kinds = model.SentencePiece
    results = {text: piece for text, piece in _results(model).items() if text not in never}
    special = {PAD: kinds.CONTROL, EOS: kinds.CONTROL, UNK: kinds.UNKNOWN}

    def listed(index: int, text: str) -> Any:
        if index in special or TAG.fullmatch(text):
            return kinds(piece=text, score=0.0, type=special.get(index, kinds.CONTROL))
        return results.get(text) or kinds(piece=text, score=0.0, type=kinds.UNUSED)

    other = type(model)()
    other.CopyFrom(model)
    del other.pieces[:]
    other.pieces.extend(listed(index, text) for index, text in enumerate(pieces))
    trainer = other.trainer_spec
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = PAD, EOS, UNK, -1
    trainer.pad_piece, trainer.eos_piece, trainer.unk_piece = pieces[PAD], pieces[EOS], pieces[UNK]
    trainer.vocab_size = len(pieces)
    return other.SerializeToString()


def ids_of(model: Any) -> dict[str, int]:
    """Returns {piece: id} of a SentencePiece model, as far as text is split into the piece; and its EOS and UNK."""
    kinds = model.SentencePiece
    known = (kinds.NORMAL, kinds.USER_DEFINED, kinds.BYTE, kinds.CONTROL, kinds.UNKNOWN)
    return {each.piece: index for index, each in enumerate(model.pieces) if each.type in known}


def _results(model: Any) -> dict[str, Any]:
    """Returns the pieces that can be the result of splitting text."""
    kinds = model.SentencePiece
    return {each.piece: each for each in model.pieces if each.type in (kinds.NORMAL, kinds.USER_DEFINED, kinds.BYTE)}
