"""Implementations of the stages that the forward calls, one file each."""
