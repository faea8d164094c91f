"""Sleep-time compute: rewrites contexts before questions about them arrive."""
