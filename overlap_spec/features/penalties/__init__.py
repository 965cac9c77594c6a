"""What requests ask of single tokens: penalties, biases, allowed tokens, bad words."""
