"""Traffic against a server: arrivals, the client processes that play them, figures, and the search for a rate."""
