"""Batch-invariant operations: a row's result never depends on the other rows."""
