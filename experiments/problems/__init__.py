"""Problems of discovery, by name in `names`; the library loads them as it loads a user's own."""
