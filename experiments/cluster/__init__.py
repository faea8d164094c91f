"""Rollouts and runs over instances, processes and clusters, and the simulated one."""
