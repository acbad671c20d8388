"""How much memory a job will need on each device, phase by phase, told before it starts."""
