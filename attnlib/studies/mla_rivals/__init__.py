"""MLA over either cache format by the kernels that engines run on Hopper."""
