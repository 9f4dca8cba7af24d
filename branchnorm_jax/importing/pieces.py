"""SentencePiece models with the ids of another vocabulary."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from branchnorm_jax.data.tokenizer import TAG
from branchnorm_jax.errors import UserError
from branchnorm_jax.importing.imported import Side
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


def make_side(
    model: Any,
    ids: Mapping[str, int],
    special: Sequence[str],
    models: Sequence[Any],
    target: bool,
    control: Collection[str] = (),
) -> Side:
    """Returns the vocabulary of one side in the order of this project.

    Special pieces come first, then language tags, then the others in the order of their ids, and in the end the pieces
    that only the SentencePiece models have. On the source side these are unknown to the network (see `Side.rows`). On
    the target side text is split into smaller pieces instead: their probability is 0, so they must not occur in
    training.

    Args:
      model: the SentencePiece model of the side.
      ids: piece -> id in the other toolkit.
      special: its pieces for PAD, EOS and UNK.
      models: the SentencePiece models of all sides that share the vocabulary.
      target: whether this is the target side.
      control: pieces that are not part of a text, so that they are never printed.

    Raises:
      UserError: if most pieces of the model have no id.
    """
    own = _results(model).keys()
    if len(own - ids.keys()) > len(own) / 2:
        raise UserError(
            f"import: {len(own - ids.keys())} of the {len(own)} pieces of the {'target' if target else 'source'}'s "
            "SentencePiece model have no id in the vocabulary: the two do not belong together"
        )
    others = sorted(ids.keys() - set(special), key=ids.__getitem__)
    more = sorted({piece for each in models for piece in _results(each)} - ids.keys())
    pieces = [*special, *sorted(others, key=lambda piece: TAG.fullmatch(piece) is None), *more]
    spm = _with_pieces(model, pieces, more if target else (), control)
    return Side(spm, pieces, [ids.get(piece, -1) for piece in pieces])


def _with_pieces(model: Any, pieces: Sequence[str], never: Collection[str], control: Collection[str]) -> bytes:
    """Returns a serialised SentencePiece model that splits text as `model` does, into pieces with other ids.

    Pieces that `model` does not have are never the result of splitting, but decoding knows them. Language tags are
    control symbols.

    Args:
      model: the model.
      pieces: all pieces in the order of their ids.
      never: pieces of `model` that must not be the result of splitting any more.
      control: further control symbols.
    """
    kinds, results, never = model.SentencePiece, _results(model), set(never)
    special = {PAD: kinds.CONTROL, EOS: kinds.CONTROL, UNK: kinds.UNKNOWN}
    # BPE also merges unused pieces, and then splits them again. With the lowest score, they come after other merges.
    lowest = min((piece.score for piece in results.values()), default=0.0) - 1

    def listed(index: int, text: str) -> Any:
        if index in special or text in control or TAG.fullmatch(text):
            return kinds(piece=text, score=0.0, type=special.get(index, kinds.CONTROL))
        known = results.get(text)
        if known is None or text in never:
            return kinds(piece=text, score=lowest if known is None else known.score, type=kinds.UNUSED)
        return known

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
    """Returns piece -> id of a SentencePiece model, for pieces of text and special pieces."""
    kinds = model.SentencePiece
    known = (kinds.NORMAL, kinds.USER_DEFINED, kinds.BYTE, kinds.CONTROL, kinds.UNKNOWN)
    return {each.piece: index for index, each in enumerate(model.pieces) if each.type in known}


def _results(model: Any) -> dict[str, Any]:
    """Returns the pieces that can be the result of splitting text."""
    kinds = model.SentencePiece
    return {each.piece: each for each in model.pieces if each.type in (kinds.NORMAL, kinds.USER_DEFINED, kinds.BYTE)}
