"""`llmgw up`: a server and an agent on loopback, one model, one real answer: the five-minute start."""

from llmgw.up.command import command

__all__ = ["command"]
