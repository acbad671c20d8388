"""Rollouts over replicas that come and go."""
