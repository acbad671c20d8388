"""Streams of items between workers."""
