"""What was found so far, and where to look next."""

from seerjax.search import archive, puct

__all__ = ["archive", "puct"]
