"""Products with few rows, streamed at the speed of memory, fused with what stands around them."""
