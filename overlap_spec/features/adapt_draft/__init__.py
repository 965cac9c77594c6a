"""A draft learns from the requests that it serves: `--adapt-draft`."""
