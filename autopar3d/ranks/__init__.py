"""Processes: starting ranks, their groups and collectives, comparing ranks, and why a collective failed."""
