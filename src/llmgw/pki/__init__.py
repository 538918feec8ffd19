"""Certificates: a small CA of one's own for servers, nodes and operators."""
