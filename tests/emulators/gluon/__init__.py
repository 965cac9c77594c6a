"""Runs Gluon kernels on a CPU, which Triton's interpreter cannot.

A Gluon kernel is a Python function over a few modules (`gl`, `ampere`, `hopper`, `cuda`). This package replaces them:

    tensors    tensors and pointers
    program    shared memory and asynchronous work; what is modelled, and what is not
    language   the modules
    launch     launches, and ops that take the CPU for a Hopper GPU
"""
