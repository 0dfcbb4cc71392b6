"""`footplate bench serve`: a served model under a fixed load, over HTTP, as its clients meet it."""
