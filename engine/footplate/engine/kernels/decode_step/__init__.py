"""What a decode step reads from the token and block tables, and what it writes back."""
