"""GPU kernels in Pallas (Mosaic GPU). They import only JAX and are usable without SeerJAX."""
