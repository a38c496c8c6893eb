"""How fast collectives are here, measured as nccl-tests does, beside others; and which algorithms are the best."""
