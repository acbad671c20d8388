"""Measurements that need a GPU: `python -m benchmarks.gpu`. They need neither Ray nor vLLM."""
