"""When requests that are traced pass from phase to phase, and where the time of steps goes."""
