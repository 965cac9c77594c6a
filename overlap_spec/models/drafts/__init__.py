"""The models that guess."""
