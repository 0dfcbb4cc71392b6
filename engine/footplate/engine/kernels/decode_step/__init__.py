"""What a decode step reads from the token and block tables, and the blocks it enters there."""
