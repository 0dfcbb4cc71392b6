"""The command `footplate`: what may know Ray and the engine; what speaks HTTP is the platform's."""
