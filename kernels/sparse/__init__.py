"""Matrix products over sparse 16-bit weights: one device layout, and the kernels that read it."""
