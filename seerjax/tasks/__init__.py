"""Where prompts come from and what a good answer is."""
