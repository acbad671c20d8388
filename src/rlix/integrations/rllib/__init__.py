"""RLlib algorithms as jobs of the pool: `config = rlix.rllib(config)`."""
