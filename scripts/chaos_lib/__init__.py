"""Faults on purpose, against a real server, real agents and fake engines, each a process of its own."""
