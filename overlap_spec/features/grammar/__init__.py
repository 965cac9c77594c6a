"""Structured output: what requests with a grammar may say."""
