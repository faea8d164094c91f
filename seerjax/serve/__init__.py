"""An OpenAI-compatible HTTP server whose responses do not depend on concurrent requests."""
