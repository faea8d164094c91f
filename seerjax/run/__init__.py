"""What every training run has: its directory, its records, its stops and what it reports."""
