"""Checks of this host behind `echelon doctor`: problems that stop or slow a run."""
