"""Invariance: does the batch change samples, ours and those of other libraries?"""
