"""Backend for ranks of one host that share memory."""
