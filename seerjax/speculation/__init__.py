"""Speculative decoding: draft sources, and budgets that draft only as much as is worthwhile."""
