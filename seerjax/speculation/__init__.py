"""Drafts: guesses at the next tokens from a group's own texts, and how many of them pay."""
