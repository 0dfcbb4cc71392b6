"""Fixed loads, and what an engine makes of them: `footplate bench engine`. `loads` needs numpy only."""
