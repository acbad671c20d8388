"""The pure brain: a snapshot of the pool in, a plan out. No Ray, no clock, no input or output, no torch."""
