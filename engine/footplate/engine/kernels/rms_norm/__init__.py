"""Root-mean-square norm, alone and fused with the residual sum."""
