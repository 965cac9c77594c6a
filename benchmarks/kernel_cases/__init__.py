"""Shapes and inputs that kernels are measured with."""
