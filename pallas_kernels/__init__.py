"""GPU kernels in Pallas (Mosaic GPU). They import JAX only and are usable without SeerJAX."""
