"""What splits of the KV axis cost that an engine fixes, over those that a library chooses."""
