"""The live audit: what is audited, and what the outcome means."""
