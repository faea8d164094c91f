"""Discovery problems, listed in `names`; the library loads them like a user's own problems."""
