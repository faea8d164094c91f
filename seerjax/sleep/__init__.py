"""Thinking about a context before its questions come: who thinks, of what, and what is kept."""
