"""The machine and its state: what a number was measured on. NVML for the GPU, never guessed."""

import ctypes
import hashlib
import importlib.util
import os
import platform
import runpy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any


def has_driver() -> bool:
    """Whether NVIDIA's driver is here. Without it there is no CUDA GPU, and torch, which takes a
    second to load, need not be asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def describe_machine(device: str = "cuda") -> dict[str, Any]:
    """What does not change during a study: GPU, its id, driver, power limit; or the CPU.

    `gpu_id` is a hash of the GPU's UUID: it distinguishes GPUs without naming them.
    """
    if device == "cpu":
        return {
            "gpu": "",
            "gpu_id": "cpu",
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
        }
    with _gpu() as (nvml, handle, properties):
        return {
            "gpu": properties.name,
            "gpu_id": _short_id(f"GPU-{properties.uuid}"),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "power_limit_w": nvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000,
            "max_sm_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "cores": os.cpu_count(),
        }


def identify_gpu() -> dict[str, str]:
    """`gpu` and `gpu_id` of the current CUDA device, be it not the first; needs no NVML."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"gpu": properties.name, "gpu_id": _short_id(f"GPU-{properties.uuid}")}


def describe_state(device: str = "cuda") -> dict[str, Any]:
    """What changes: SM and memory clocks (MHz), temperature (C), power (W), throttle reasons."""
    if device == "cpu":
        return {}
    with _gpu() as (nvml, handle, _):
        return state_of(nvml, handle)


def state_of(nvml: Any, handle: Any) -> dict[str, Any]:
    """The same of the GPU that NVML has under this handle."""
    return {
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) // 1000,
        "throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }


@contextmanager
def nvml_of(gpu_id: str) -> Iterator[tuple[Any, Any]]:
    """NVML and its handle of the GPU with that id, without CUDA; RuntimeError if it is not here."""
    import pynvml

    pynvml.nvmlInit()
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            if _short_id(_text(pynvml.nvmlDeviceGetUUID(handle))) == gpu_id:
                yield pynvml, handle
                return
        raise RuntimeError(f"GPU {gpu_id!r} must be of this machine, NVML has none")
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value


@contextmanager
def load_reader() -> Iterator[Callable[[], tuple[int, int]]]:
    """A function that reads power (W) and SM clock (MHz) of the GPU while it works."""
    with _gpu() as (nvml, handle, _):
        yield lambda: (
            nvml.nvmlDeviceGetPowerUsage(handle) // 1000,
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        )


def describe_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of Python, CUDA and of the `distributions` that are installed; loads none."""
    versions = {"python": platform.python_version()}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    spec = importlib.util.find_spec("torch")
    if "torch" in versions and spec and spec.origin:
        version_file = Path(spec.origin).with_name("version.py")
        torch = runpy.run_path(str(version_file))
        versions["torch"] = torch["__version__"]
        versions["cuda"] = torch["cuda"] or "none"
    return versions


def _short_id(uuid: str) -> str:
    return hashlib.sha256(uuid.encode()).hexdigest()[:8]


@contextmanager
def _gpu() -> Iterator[tuple[Any, Any, Any]]:
    """NVML, its handle of CUDA's device 0, and torch's properties of that GPU."""
    import pynvml
    import torch

    if not torch.cuda.is_available():
        why = "no CUDA GPU (torch.cuda.is_available() is False)"
        raise RuntimeError(f"device must be 'cpu' here: {why}")
    pynvml.nvmlInit()
    try:
        properties = torch.cuda.get_device_properties(0)
        # CUDA_VISIBLE_DEVICES reorders devices; only the UUID names the same GPU to both.
        yield pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}"), properties
    finally:
        pynvml.nvmlShutdown()
