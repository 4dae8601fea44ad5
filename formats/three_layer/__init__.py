"""The three-layer format for sparse weights: 2:4 operand, slot filling, residual."""
