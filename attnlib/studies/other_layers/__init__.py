"""The layers of a second judge."""
