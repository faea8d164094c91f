"""Pages of keys and values: who holds them, and where they go when they leave a device."""
