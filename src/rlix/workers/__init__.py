"""Processes on devices: groups of ranks of one class, their placement, the fork server, turns on devices."""
