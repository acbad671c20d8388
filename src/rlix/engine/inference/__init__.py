"""Engines that generate: the engine, its replicas, prompts and requests."""
