"""What changes logits before tokens are drawn."""
