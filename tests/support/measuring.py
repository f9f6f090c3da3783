"""A worker that measures one item in this process."""

from attnlib.run.worker import Worker


def measure(item, device="cpu"):
    """The record that a worker makes of `item`."""
    job = {"study": "demo", "round": 0, "device": device, "command": "repeat me"}
    return Worker(job).measure(item)
