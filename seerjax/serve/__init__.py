"""An OpenAI-style HTTP server whose answers do not depend on who else is asking."""
