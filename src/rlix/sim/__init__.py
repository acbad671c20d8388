"""A discrete-event simulator that drives the scheduler's own code on a virtual clock."""
