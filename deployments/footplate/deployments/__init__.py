"""What runs where on Ray: composition root, gateway, engine replicas, token channel, command line."""
