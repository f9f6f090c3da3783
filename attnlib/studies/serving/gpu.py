"""The GPU beside a server, by NVML: what is used of its memory, and its state. No CUDA context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...measure.machine import nvml_of, state_of

EVERY_S = 0.1


@dataclass
class Peak:
    """Most bytes in use beyond those before."""

    bytes: int = 0


class Memory:
    """Reads the memory of the GPU with that id; of a machine without one it reads nothing."""

    def __init__(self, gpu_id: str) -> None:
        self._gpu_id = gpu_id

    @contextmanager
    def watched(self) -> Iterator[Peak]:
        """The peak during the block."""
        peak = Peak()
        if self._gpu_id == "cpu":
            yield peak
            return
        with nvml_of(self._gpu_id) as (nvml, handle):
            before = nvml.nvmlDeviceGetMemoryInfo(handle).used
            done = threading.Event()

            def watch() -> None:
                while not done.wait(EVERY_S):
                    used = nvml.nvmlDeviceGetMemoryInfo(handle).used
                    peak.bytes = max(peak.bytes, used - before)

            thread = threading.Thread(target=watch, daemon=True)
            thread.start()
            try:
                yield peak
            finally:
                done.set()
                thread.join()

    def state(self) -> dict[str, Any]:
        """Clocks, temperature, power and throttle reasons, as records have them."""
        if self._gpu_id == "cpu":
            return {}
        with nvml_of(self._gpu_id) as (nvml, handle):
            return state_of(nvml, handle)
