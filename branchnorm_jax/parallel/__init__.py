"""Parallelism: the device mesh, shardings, and the processes of a multi-host run."""
