"""Folder of the module that Python imports at the start of each rank of `echelon run`."""
