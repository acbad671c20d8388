"""The page of `rlix serve`: what it is told of the queue, the pool and the runs, and the files that it is made of."""
