"""Pictures of a run, from the files that it left."""

from pathlib import Path

from branchnorm_jax.errors import UserError
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.workdir import Workdir


def draw_curves(workdir: Workdir) -> Path:
    """Draws loss and BLEU, alpha and learning rate over the updates of a run into `<workdir>/curves.png`.

    Raises:
      UserError: if the run has logged nothing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    updates, validations = read_lines(workdir / "metrics.jsonl"), read_lines(workdir / "validation.jsonl")
    if not updates:
        raise UserError(f"{workdir / 'metrics.jsonl'}: nothing to draw; train first, with train.log_every > 0")

    def column(lines: list[dict], name: str) -> tuple[list[float], list[float]]:
        found = [(line["step"], line[name]) for line in lines if name in line]
        return [step for step, _ in found], [value for _, value in found]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(*column(updates, "nll"), linewidth=0.8, color="tab:blue", label="training nll")
    left.plot(*column(validations, "nll"), "o-", markersize=3, color="tab:orange", label="validation nll")
    left.set(xlabel="update", ylabel="nats per target token", ylim=(0, None))
    left.legend(loc="center right", frameon=False)
    if any("bleu" in line for line in validations):
        bleu = left.twinx()
        bleu.plot(*column(validations, "bleu"), "s--", markersize=3, color="tab:green")
        bleu.set(ylim=(0, 100))
        bleu.set_ylabel("validation BLEU", color="tab:green")
    right.plot(*column(updates, "alpha"), color="tab:red")
    right.set(xlabel="update", ylim=(0, 1.05))
    right.set_ylabel("alpha", color="tab:red")
    rate = right.twinx()
    rate.plot(*column(updates, "learning_rate"), color="tab:gray")
    rate.set(ylim=(0, None))
    rate.set_ylabel("learning rate", color="tab:gray")
    path = workdir / "curves.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
