"""Flows: what a user writes once, and what runs it as a plan says."""
