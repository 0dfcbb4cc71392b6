"""Files of usage that add up: columns, formats, and what stands beside a file."""
