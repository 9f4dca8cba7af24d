"""Access to Matplotlib, an optional package."""

from typing import Any

from branchnorm_jax.errors import MissingExtraError, needs_extra
from branchnorm_jax.training import logs

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""The palette of Okabe and Ito (2008), which colour-blind readers can distinguish; its yellow is too pale for lines."""


def pyplot() -> Any:
    """Returns `matplotlib.pyplot`, set up for files, with `COLOURS` as C0 to C6.

    Raises:
      MissingExtraError: if Matplotlib is not installed.
    """
    with needs_extra("plots", "figures need matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    pyplot.rcParams["axes.prop_cycle"] = pyplot.cycler(color=COLOURS)
    return pyplot


def line(index: int) -> dict[str, Any]:
    """Returns colour, width and dashes of a line in a figure.

    Where curves coincide, the earlier ones stay visible: later lines are thinner, and every second one has gaps.
    """
    dashes = (0, (5, 3)) if index and index % 2 == 0 else "-"
    return {"color": COLOURS[index % len(COLOURS)], "linewidth": max(1.0, 3 * 0.8**index), "linestyle": dashes}


def can_draw(name: str) -> bool:
    """Returns whether the figure `name` can be drawn; if not, logs what to install."""
    try:
        pyplot()
    except MissingExtraError as error:
        logs.say(f"{name} is not drawn: {error}")
        return False
    return True
