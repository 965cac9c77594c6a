"""Log-probs of tokens that requests ask for, of their output and of their prompts."""
