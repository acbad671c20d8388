"""A job's life outside its algorithm: launch, coordinator, run folder."""
