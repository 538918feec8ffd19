"""One long-lived socket per agent: JSON lines over mutual TLS."""
