"""Analysis: cost plans and preflight checks before a run, plots and sweeps after it."""
