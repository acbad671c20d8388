"""How jobs share devices: the orchestrator, the scheduler service, device discovery and the journal, as Ray actors."""
