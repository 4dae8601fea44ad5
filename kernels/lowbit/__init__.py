"""Matrix products over low-bit weights: one device layout, and the kernels that read it."""
