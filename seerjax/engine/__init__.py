"""Paged, continuously batched sampling."""
