"""What guesses: one file for each way to propose."""
