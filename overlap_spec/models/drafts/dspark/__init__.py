"""DSpark: a DFlash block whose guesses know the guess before them (2026, github.com/deepseek-ai/DeepSpec)."""
