"""COMET, a neural metric that also reads the source (optional package unbabel-comet)."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import Measure, Score


def load_comet(model: str) -> Measure:
    """Loads a COMET model and returns its measure.

    The measure is the mean score over sentences, times 100.

    Args:
      model: a checkpoint file, or a name such as Unbabel/wmt22-comet-da, which is downloaded once.

    Raises:
      UserError: if the package is not installed, or the model cannot be loaded.
    """
    try:
        import torch
        from comet import download_model, load_from_checkpoint
    except ImportError as error:
        raise UserError(f"config: evaluate.comet={model}: {error}; run `pip install unbabel-comet`") from error
    try:
        network = load_from_checkpoint(model if Path(model).is_file() else download_model(model))
    except Exception as error:  # the model hub and torch raise various types
        raise UserError(f"config: evaluate.comet={model}: {' '.join(str(error).split())}") from error
    signature = f"{model}|unbabel-comet-{importlib.metadata.version('unbabel-comet')}"

    def measure(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[Score]:
        texts = zip(sources, hypotheses, references, strict=True)
        samples = [{"src": source, "mt": hypothesis, "ref": reference} for source, hypothesis, reference in texts]
        gpus = int(torch.cuda.is_available())
        prediction = network.predict(samples, batch_size=16, gpus=gpus, progress_bar=False)
        return [Score("comet", 100 * float(prediction.system_score), signature)]

    return measure
