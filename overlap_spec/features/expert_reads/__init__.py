"""How many distinct experts the decode steps of a mixture read: what its steps cost beside their width."""
