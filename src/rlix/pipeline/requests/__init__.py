"""Training by requests: somebody else's program says which pass and which step comes next, in place of a loop here."""
