"""The two runs of `scripts/usage_gateway`."""
