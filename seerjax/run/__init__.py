"""Shared parts of all training runs: configuration, directory, records, signals and reports."""
