"""The HTTP contract: what a client of the gateway sees, and the order of steps of one request."""
