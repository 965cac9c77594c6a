"""What README and docs quote of a GPU: parts that are measured apart, their files, and the record that they make."""
