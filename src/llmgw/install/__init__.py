"""Choose, resolve, fetch, unpack, prove, mark: shared by engines and by llmgw itself."""
