"""A program foreseen on a cluster: a step recorded on fake tensors, checked, and played on a model of the hardware."""
