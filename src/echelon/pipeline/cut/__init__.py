"""Cutting of any module into stages, at named layers or balanced by measured time."""
