"""Weights on their way from a trainer to replicas: buckets, publication, transfer."""
