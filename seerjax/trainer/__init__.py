"""Training of the weights on groups of rollouts."""

from seerjax.trainer import advantages, losses, packing

__all__ = ["advantages", "losses", "packing"]
