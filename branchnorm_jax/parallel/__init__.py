"""Devices: the mesh, its shardings, and the processes of a run."""
