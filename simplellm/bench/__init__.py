"""`simplellm bench`: what the engine costs and how far that is from the floor. Every measurement ends in a line of JSON."""
