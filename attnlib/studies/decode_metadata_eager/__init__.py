"""What one launch of a step's metadata costs the host."""
