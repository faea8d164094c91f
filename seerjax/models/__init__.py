"""Decoders as pure functions of their parameters."""
