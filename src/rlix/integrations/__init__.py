"""Other people's trainers, environments and agents on the pool, as they are."""
