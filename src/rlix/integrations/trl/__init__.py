"""TRL trainers as jobs of the pool, without a change to their scripts."""
