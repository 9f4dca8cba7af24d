"""What the loop remembers beside the train state: counters, scores and warnings, saved as JSON in every checkpoint."""

import dataclasses

SURVIVES_ROLLBACK = (
    *("train_seconds", "target_tokens", "compile_seconds", "compiled_shapes"),
    *("skipped", "spikes", "rollbacks", "left_out"),
)
"""Fields of `LoopState` that a rollback keeps; the others go back to the checkpoint."""


@dataclasses.dataclass
class LoopState:
    """What the loop remembers between processes. The names of the fields are keys in the checkpoints."""

    train_seconds: float = 0.0
    target_tokens: int = 0
    evaluated: int = -1
    """Step of the last validation."""
    score: float | None = None
    """Score of the last validation; more is better."""
    best_score: float | None = None
    since_best: int = 0
    """Validations since the best one."""
    compile_seconds: float = 0.0
    """Time to trace, lower and compile the update for all shapes, in the last process that did so."""
    compiled_shapes: int = 0
    recent_scores: list[float] = dataclasses.field(default_factory=list)
    """Scores of the last validations, oldest first, for `schedules.val_decay`."""
    skipped: int = 0
    """Skipped updates (`train.nonfinite=skip`, `train.spike=skip`). Updates that a rollback repeats count again."""
    skipped_in_a_row: int = 0
    spikes: int = 0
    rollbacks: int = 0
    troubled: int = -1
    """The update that caused the last rollback."""
    left_out: list[list[int]] = dataclasses.field(default_factory=list)
    """First and last of each range of updates that are left out, because a rollback blames their batches."""
    vanishing: str = ""
    """Where the gradient vanished when the layers were last watched, as words."""
    collapsed: str = ""
    """Which stacks no longer told tokens apart when the layers were last watched, as words."""

    @property
    def is_best(self) -> bool:
        """Whether the last validation was the best one."""
        return self.since_best == 0

    def leaves_out(self, step: int) -> bool:
        """Whether the update of `step` is left out."""
        return any(first <= step <= last for first, last in self.left_out)

    def count_update(self, seconds: float, target_tokens: int, kind: str, skipped: bool) -> None:
        """Counts one update with its time and its trouble: `kind` and `skipped` as in `trouble.Decision`."""
        self.train_seconds += seconds
        self.target_tokens += target_tokens
        self.spikes += kind == "spike"
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def add_score(self, step: int, score: float, patience: int) -> None:
        """Takes the score of the validation at `step`; keeps the last `patience` + 1 scores if `patience` > 0.

        Among equal scores the latest is the best: its state has seen more, and its checkpoint is the one that is kept.
        """
        self.evaluated, self.score = step, score
        if self.best_score is None or score >= self.best_score:
            self.best_score, self.since_best = score, 0
        else:
            self.since_best += 1
        if patience:
            self.recent_scores = [*self.recent_scores, score][-1 - patience :]

    def rolled_back(self, before: "LoopState", troubled: int) -> "LoopState":
        """This state, restored from a checkpoint, after a rollback from `before` because of update `troubled`."""
        surviving = {name: getattr(before, name) for name in SURVIVES_ROLLBACK}
        return dataclasses.replace(self, **surviving | {"rollbacks": before.rollbacks + 1, "troubled": troubled})
