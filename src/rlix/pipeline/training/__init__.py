"""How a train module computes: micro-batches, scores of tokens, optimizer steps."""
