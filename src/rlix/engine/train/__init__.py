"""Engines that train: the engine, its workers, materialization and checkpoints."""
