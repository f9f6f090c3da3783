"""What attention sinks and a sliding window cost a decode call."""
