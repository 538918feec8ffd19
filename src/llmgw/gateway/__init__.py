"""The data plane: from a client's request to a replica's engine and back, in its own process."""
