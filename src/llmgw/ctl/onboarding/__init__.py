"""Adding, upgrading and removing nodes over the system's own ssh, in stages that can be cut and run again."""
