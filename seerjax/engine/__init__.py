"""Inference engine: paged KV memory, continuous batching and sampling."""
