"""Matrix products over integer weights: one device layout, and the kernels that read it."""
