"""The sampler through torch.compile: `--enable-torch-compile`."""
