"""A cluster on paper: the rollout's own scheduler, driven by a cost model and a clock."""
