"""Runs the kernels that Triton's interpreter cannot, on a CPU. See README.md."""
