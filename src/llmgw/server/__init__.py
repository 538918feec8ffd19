"""`llmgw server`: the control process. It decides; it never stands between a client and a token."""
