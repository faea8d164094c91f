"""A model small enough to run every experiment in seconds, and a run of it."""

from __future__ import annotations

from tiny_runs import tiny, trained

__all__ = ["tiny", "trained"]
