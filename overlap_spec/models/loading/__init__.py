"""From checkpoints to models."""
