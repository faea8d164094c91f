"""A simulated cluster: the real rollout scheduler, driven by a cost model and a simulated clock."""
