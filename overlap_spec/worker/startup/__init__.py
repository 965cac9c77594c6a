"""What is settled at start: memory, warm-up, measured costs."""
