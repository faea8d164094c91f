"""Handlers of XLA's foreign function interface that numba compiles: no C compiler, no wheel."""
