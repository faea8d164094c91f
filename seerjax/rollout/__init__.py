"""Which request runs where and when, and what is kept of it."""
