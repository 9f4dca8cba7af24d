"""The loop state: counters, scores and warnings. Every checkpoint has it as JSON next to the train state."""

import dataclasses

SURVIVES_ROLLBACK = (
    *("train_seconds", "target_tokens", "compile_seconds", "compiled_shapes"),
    *("skipped", "spikes", "rollbacks", "left_out", "failed_saves"),
)
"""Fields of `LoopState` that keep their values in a rollback. The checkpoint determines the other fields."""


@dataclasses.dataclass
class LoopState:
    """State of the loop that later processes restore. The names of the fields are keys in the checkpoints."""

    train_seconds: float = 0.0
    target_tokens: int = 0
    evaluated: int = -1
    """Step of the last validation."""
    score: float | None = None
    """Score of the last validation; higher is better."""
    best_score: float | None = None
    since_best: int = 0
    """Number of validations since the last one that was better than all before."""
    compile_seconds: float = 0.0
    """Time in seconds to trace, lower and compile the update for all shapes, in the last process that compiled it."""
    compiled_shapes: int = 0
    recent_scores: list[float] = dataclasses.field(default_factory=list)
    """Scores of the last validations, oldest first, for `schedules.val_decay`."""
    skipped: int = 0
    """Number of skipped updates (`train.nonfinite=skip`, `train.spike=skip`).

    Updates that a rollback repeats count again.
    """
    skipped_in_a_row: int = 0
    failed_saves: int = 0
    """Number of checkpoints that could not be written (`train.on_save_failure=warn`)."""
    spikes: int = 0
    rollbacks: int = 0
    troubled: int = -1
    """The update that caused the last rollback."""
    left_out: list[list[int]] = dataclasses.field(default_factory=list)
    """First and last update of each range that the run leaves out because a rollback blames its batches."""
    vanishing: str = ""
    """Description of the layers with vanishing gradients at the last measurement; "" if there are none."""
    collapsed: str = ""
    """Description of the collapsed stacks at the last measurement (`watch.COLLAPSED`); "" if there are none."""

    @property
    def is_best(self) -> bool:
        """Whether the last validation was the best one, or equal to it."""
        return self.score == self.best_score

    def leaves_out(self, step: int) -> bool:
        """Returns whether the update of `step` is left out."""
        return any(first <= step <= last for first, last in self.left_out)

    def count_update(self, seconds: float, target_tokens: int, kind: str, skipped: bool) -> None:
        """Counts one update.

        Args:
          seconds: its duration.
          target_tokens: its number of target tokens.
          kind: its trouble, as in `trouble.Decision`.
          skipped: whether the update was skipped.
        """
        self.train_seconds += seconds
        self.target_tokens += target_tokens
        self.spikes += kind == "spike"
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def add_score(self, step: int, score: float, patience: int) -> None:
        """Records the score of the validation at `step`.

        If `patience` > 0, the last `patience` + 1 scores are kept. Among equal scores the latest is the best, because
        its state has seen more data. The run keeps the checkpoint of that state, but it counts as no improvement.
        """
        self.evaluated, self.score = step, score
        better = self.best_score is None or score > self.best_score
        self.since_best = 0 if better else self.since_best + 1
        self.best_score = score if better else self.best_score
        if patience:
            self.recent_scores = [*self.recent_scores, score][-1 - patience :]

    def rolled_back(self, before: "LoopState", troubled: int) -> "LoopState":
        """Returns the loop state after a rollback.

        `self` is the loop state from the checkpoint, `before` the loop state before the rollback, and `troubled` the
        update that caused the rollback.
        """
        surviving = {name: getattr(before, name) for name in SURVIVES_ROLLBACK}
        return dataclasses.replace(self, **surviving | {"rollbacks": before.rollbacks + 1, "troubled": troubled})
