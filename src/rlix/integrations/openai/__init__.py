"""A job's elastic rollouts behind an OpenAI-compatible endpoint: agents of any framework play its episodes."""
