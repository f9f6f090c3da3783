"""The metadata of a step: our kernels, their rivals, and the oracle."""
