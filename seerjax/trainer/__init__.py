"""What the weights learn from a group of rollouts."""

from seerjax.trainer import advantages, losses, packing

__all__ = ["advantages", "losses", "packing"]
