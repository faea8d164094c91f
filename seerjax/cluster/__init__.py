"""Rollouts on workers that come and go: one engine process each, one driver for all of them."""
