"""Inference engines as plugins of the entry-point group `llmgw.providers`."""
