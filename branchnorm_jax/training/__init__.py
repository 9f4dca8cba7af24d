"""One update, then many: schedules, optimiser, train step, loop, checkpoints, logs."""
