"""Looking up rows of the token table."""
