"""Programs that nobody trusts, run under limits."""
