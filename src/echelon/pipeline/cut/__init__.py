"""Cutting: any module into stages, by name or balanced by a measured run."""
