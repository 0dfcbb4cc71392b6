"""How much of the platform a tenant, a key and a model may use at a time: limits, decisions, reservations."""
