"""Speculative decoding: speed-up by drafter, batch and shape of drafts."""
