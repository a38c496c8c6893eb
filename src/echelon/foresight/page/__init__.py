"""A foreseen step as one HTML file that needs no network."""
