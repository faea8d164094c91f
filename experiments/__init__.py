"""One file, one claim."""
