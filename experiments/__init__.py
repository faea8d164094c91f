"""Experiments: each file measures one claim."""
