"""What a step's metadata costs, design by design."""
