"""What accepts or rejects guesses: one file for each rule."""
