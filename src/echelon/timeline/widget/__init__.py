"""Timeline for browsers: zoom, hover and search, in one piece of HTML that needs no network."""
