"""The benchmark of the kernels: `python -m pallas_kernels.bench`."""
