"""`llmgw ctl`: the operator's hand. Light: it talks to the admin API and prints."""
