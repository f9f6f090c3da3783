"""The metadata of a decode step where an engine has it: between kernels of others."""
