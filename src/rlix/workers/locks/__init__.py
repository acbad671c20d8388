"""Who of one job's parts is on its devices: turns, in the order of their data."""
