"""Cases that no client would send, by hypothesis and schemathesis."""
