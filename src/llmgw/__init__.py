"""llmgw turns a pile of Linux machines into one LLM endpoint."""

__version__ = "0.1.0"
