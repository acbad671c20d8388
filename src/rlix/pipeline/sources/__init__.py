"""Where samples come from: tasks, data, rewards, environments."""
