"""What the scripts about the wire share: a server in a process of its own, and figures from /proc."""
