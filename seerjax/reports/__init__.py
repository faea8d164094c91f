"""A run as a page for people: one file, no script, nothing loaded."""
