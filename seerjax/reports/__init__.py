"""HTML reports of runs: a single file without scripts or external resources."""
