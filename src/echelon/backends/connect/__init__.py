"""Connections between processes: rendezvous, handshake and sockets."""
