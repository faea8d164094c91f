"""One problem's search: what is found, where to look next, and what is on record."""
