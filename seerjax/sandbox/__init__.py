"""Untrusted programs, run under limits."""
