"""What runs where on Ray: composition root, gateway and engine replicas, the token channel, the command line."""
