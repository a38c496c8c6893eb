"""The calls that a group takes, a file for each kind; `echelon.group` puts them together."""
