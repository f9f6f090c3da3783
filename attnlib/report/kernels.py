"""Kernels that start at once: forks of one process that has imported what notebooks import.

A kernel of its own spends one to three seconds of CPU on imports, and a report has eleven of them.
"""

import multiprocessing
import os
import signal
from typing import Any

from jupyter_client import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalPortCache

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    "torch pandas pyarrow.parquet scipy.special matplotlib.pyplot attnlib.studies "
    "ipykernel.kernelapp".split()
)
PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")


class ForkedKernel(KernelManager):
    """What nbclient asks of a kernel: start, whether it is alive, interrupt, shut down."""

    client_class = "jupyter_client.asynchronous.AsyncKernelClient"

    def start_kernel(self, *, extra_arguments: list[str], cwd: str) -> None:
        """Fork a kernel that works in the folder `cwd`."""
        for name in PORTS:
            setattr(self, name, LocalPortCache.instance().find_available_port(self.ip))
        self.write_connection_file()
        arguments = ["-f", self.connection_file, *extra_arguments]
        self.fork = FORKS.Process(target=_serve, args=(arguments, cwd), daemon=True)
        self.fork.start()

    def is_alive(self) -> bool:
        """Whether its process runs."""
        return bool(self.fork.is_alive())

    async def _async_is_alive(self) -> bool:
        return self.is_alive()

    def interrupt_kernel(self, *_: Any, **__: Any) -> None:
        """Stop the cell that runs."""
        os.kill(int(self.fork.pid or 0), signal.SIGINT)

    def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        """End its process."""
        self.fork.kill()
        self.fork.join()


def _serve(arguments: list[str], cwd: str) -> Any:
    import matplotlib as mpl
    import pandas as pd
    from ipykernel.kernelapp import IPKernelApp

    # What both choose where a kernel imports them.
    mpl.rcParams["backend"] = "module://matplotlib_inline.backend_inline"
    pd.set_option("display.max_columns", 20)
    os.chdir(cwd)
    IPKernelApp.launch_instance([*arguments, f"--IPKernelApp.parent_handle={os.getppid()}"])
