"""What `scripts/fuzz_gateway_sockets` is made of: clients' bytes, a hostile engine, the judging of answers."""
