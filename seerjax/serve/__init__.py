"""An OpenAI-compatible HTTP server with responses that do not depend on concurrent requests."""
