"""XLA FFI handlers compiled by numba: no C compiler, no wheel."""
