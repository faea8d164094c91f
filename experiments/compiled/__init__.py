"""Steps for accelerators: compiled, and timed where there is one."""
