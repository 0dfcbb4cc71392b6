"""Parts that models share: rotary tables, attention and the gated MLP, written on the kernel protocol."""
