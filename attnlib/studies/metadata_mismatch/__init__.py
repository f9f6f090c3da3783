"""What happens when metadata does not fit its call."""
