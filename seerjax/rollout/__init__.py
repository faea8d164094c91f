"""Rollouts: scheduling of requests over instances, and the journal of their results."""
