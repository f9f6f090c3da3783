"""nbval's kernels as the report has them: forks that need not import torch anew."""

from nbval import kernel

from attnlib.report.kernels import ForkedKernel


class Kernel(ForkedKernel):
    client_class = "jupyter_client.blocking.BlockingKernelClient"

    def start_kernel(self, *, cwd, stderr):
        stderr.close()
        super().start_kernel(extra_arguments=["--IPKernelApp.log_level=40"], cwd=cwd)


kernel.KernelManager = lambda **_: Kernel(kernel_name="python3")
