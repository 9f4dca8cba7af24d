"""Training: schedules, optimisers, the train step, the training loop, checkpoints and logs."""
