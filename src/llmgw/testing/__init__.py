"""Public helpers for tests of llmgw and of engine plugins: fakes, a fake engine, the provider conformance kit."""
