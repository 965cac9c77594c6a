"""Attacks on a real server by one client, and what they may cost another one."""
