"""What would stop or slow a run on this host: `echelon doctor`."""
