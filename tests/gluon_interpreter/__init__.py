"""Runs Gluon kernels on a CPU, one program after another, through the ops that launch them on a Hopper GPU.

Triton's own interpreter has no Gluon. A Gluon kernel is plain Python over a few names, so this package gives its module
other names: `tensors` (values and addresses), `machine` (what goes on while a program runs, and what is not modelled),
`language` (the names), `launch` (grids, arguments, and ops that believe to be on a Hopper).
"""
