"""Rollouts on workers that may join and leave: one engine process each, and one driver."""
