"""`llmgw agent`: converges one node on what the server wants, and says what is."""
