"""The tokenizer's part of the live audit: what is audited, and what the outcome means."""
