"""The rows of the table of real traffic: their limits, and the measurements that no other benchmark has."""
