"""What may be said next: drafts from a group's own texts, and how many tokens of them pay."""
