"""Clients whose API keys have different names share nothing that is cached."""
