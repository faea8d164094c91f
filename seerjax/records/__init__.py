"""Files of checksummed records: lines, and an open file with one writer."""
