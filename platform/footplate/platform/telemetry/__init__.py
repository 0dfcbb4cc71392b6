"""What the platform tells of itself: metadata only, through one list of names and forms."""
