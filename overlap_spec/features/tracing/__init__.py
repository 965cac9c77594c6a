"""When requests that are traced pass from phase to phase."""
