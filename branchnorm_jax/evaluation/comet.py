"""COMET, where it is installed: a neural metric that also reads the source."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import Score


def comet(model: str, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """The mean over sentences, times 100.

    Args:
      model: a file (model.ckpt), or a name such as Unbabel/wmt22-comet-da, which is downloaded once.
      sources: one a line; hypotheses and references are theirs.
      hypotheses: translations.
      references: one each.

    Raises:
      UserError: if the package is not installed, or the model cannot be had.
    """
    try:
        from comet import download_model, load_from_checkpoint
    except ImportError as error:
        raise UserError(f"config: evaluate.comet={model}: {error}; run `pip install unbabel-comet`") from error
    try:
        network = load_from_checkpoint(model if Path(model).is_file() else download_model(model))
    except Exception as error:  # whatever its hub and torch raise
        raise UserError(f"config: evaluate.comet={model}: {' '.join(str(error).split())}") from error
    names = ("src", "mt", "ref")
    samples = [dict(zip(names, texts, strict=True)) for texts in zip(sources, hypotheses, references, strict=True)]
    found = network.predict(samples, batch_size=16, gpus=0, progress_bar=False)
    signature = f"{model}|unbabel-comet-{importlib.metadata.version('unbabel-comet')}"
    return Score("comet", 100 * float(found.system_score), signature)
