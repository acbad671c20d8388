"""Where the parts of a job run, as a plan of `rlix.flow.planner` has it. Nothing here imports torch."""
